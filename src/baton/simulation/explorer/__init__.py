"""Every interleaving of a small scenario, each state once: `explorer` walks, `explored*` are the worlds that
it walks through, `machines` and `copying` make states that can be copied and compared.
"""
