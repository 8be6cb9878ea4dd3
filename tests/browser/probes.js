// What tests ask a page; runs in it before its own script.
window.wrong = [];  // what its policy refused
window.long = [];   // milliseconds of tasks that took more than 50
addEventListener("securitypolicyviolation", (event) => wrong.push(`${event.violatedDirective} ${event.blockedURI}`));
new PerformanceObserver((list) => long.push(...list.getEntries().map((one) => one.duration)))
  .observe({ type: "longtask", buffered: true });

window.text = (id) => document.getElementById(id).textContent;
window.count = (id) => document.getElementById(id).childElementCount;

// Texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, AA), without what is disabled.
window.faint = () => {
  const parts = (text) => { const [r, g, b, a] = text.match(/[0-9.]+/g).map(Number); return [r, g, b, a ?? 1]; };
  const linear = (value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (text) => {
    const [r, g, b] = parts(text).map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const owner = node.parentElement;
    if (!node.data.trim() || !owner.checkVisibility() || owner.disabled || owner.closest("script, style")) continue;
    let behind = owner;
    const root = document.documentElement;
    while (behind !== root && parts(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [a, b] = [light(getComputedStyle(owner).color), light(getComputedStyle(behind).backgroundColor)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${node.data.trim()} ${ratio.toFixed(2)}`);
  }
  return found;
};

// What has the keyboard's focus, and whether that is seen.
window.focused = () => {
  const at = document.activeElement, box = at.getBoundingClientRect(), style = getComputedStyle(at);
  return {
    name: at.id || at.getAttribute("aria-label") || at.textContent || at.tagName,
    seen: box.width > 0 && box.top >= 0 && box.bottom <= innerHeight,
    ring: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
  };
};

// `gone`: when an instance was first seen to be anything but ready, even if only for a moment.
window.gone = 0;
window.watchStates = () => new MutationObserver(() => {
  const states = [...document.querySelectorAll("td.state")].map((one) => one.textContent);
  if (!gone && states.some((one) => one !== "ready")) gone = Date.now();
}).observe(document.getElementById("instances"), { subtree: true, childList: true, characterData: true });
