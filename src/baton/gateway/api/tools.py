"""OpenAI's tools and the choice of them, checked.  Pure: for helpers and the Python API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from baton.gateway.api.custom import CustomTool, as_function, read_custom
from baton.gateway.errors import BadRequest

MAX_TOOLS = 1024
"""Of one request."""
KINDS = ("function", "custom")
"""Of tools that can be called here: who asks answers their calls."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}\Z")
_MAX_DEPTH = 8
"""Of a parameter's schema, where its types are looked for."""
_MAX_CHOICES = 16


class Tools(msgspec.Struct, array_like=True, frozen=True):
    """What of a request's tools concerns its answers."""

    names: list[str] = []
    types: dict[str, dict[str, tuple[str, ...]]] = {}
    """Tool → parameter → types of JSON that it may have; none: its schema does not say."""
    choice: str = "auto"
    """`auto`, `none`, `required`; else the tool that must be called, if `named`."""
    named: bool = False
    strict: list[str] = []
    """Names of those whose arguments must follow their schema."""
    bound: list[str] = []
    """Of those that follow it if it can be kept, and else any."""
    schemas: bytes = b"{}"
    """Of those whose arguments are bound: name → schema, as JSON."""
    custom: list[str] = []
    """Of those that take a text: their calls' arguments are `{"input": …}` for the model alone."""
    grammars: dict[str, str] = {}
    """Of those of them whose text is bound: name → Lark grammar."""

    def without_schemas(self) -> Tools:
        """For who reads calls, and does not bind them."""
        return msgspec.structs.replace(self, schemas=b"{}", grammars={})

    @property
    def wanted(self) -> bool:
        """There are tools that may be called."""
        return bool(self.names) and (self.named or self.choice != "none")

    @property
    def demanded(self) -> bool:
        """A call must come."""
        return self.named or self.choice == "required"


def read_tools(tools: object, choice: object = None, *, bind: bool = False) -> Tools:
    """`bind`: those that do not say whether they are strict are bound as far as that is possible.  Raises
    `BadRequest` with the place of what is wrong."""
    if tools is None:
        tools = []
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise BadRequest("tools: must be a list of tools", param="tools")
    check_count(len(tools))
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise BadRequest(
            f"tools: {twice!r} is there more than once; give each function a name of its own", param="tools"
        )
    chosen, named = _choice(choice, names)
    types = {
        function["name"]: found for function in functions if (found := _types_of(function.get("parameters")))
    }
    strict = [function["name"] for function in functions if function.get("strict")]
    custom = _custom(tools)
    texts = [tool.name for tool in custom]
    loose = [
        function["name"]
        for function in functions
        if function.get("strict") is None and (bind or function["name"] in texts)
    ]
    if chosen == "none":
        return Tools(names, types, chosen, custom=texts)
    bound = [chosen] if named else names if chosen == "required" else [*strict, *loose]
    schemas = {
        function["name"]: function["parameters"]
        for function in functions
        if function["name"] in bound and function.get("parameters")
    }
    grammars = {tool.name: tool.grammar for tool in custom if tool.grammar and tool.name in bound}
    return Tools(names, types, chosen, named, strict, loose, _encoded(schemas), texts, grammars)


def check_count(count: int) -> None:
    """Of all tools of a request, also of those that are left out.  Raises `BadRequest`."""
    if count > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS}, not {count}; send fewer", param="tools")


def _custom(tools: Sequence[Any]) -> list[CustomTool]:
    return [
        read_custom(tool["custom"], f"tools[{i}].custom")
        for i, tool in enumerate(tools)
        if tool.get("type") == "custom"
    ]


def shown(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """As the model sees them: each of them a function.  (They were read before.)"""
    if tools is None:
        return None
    return [
        {"type": "function", "function": as_function(read_custom(tool["custom"], "tools"))}
        if tool.get("type") == "custom"
        else dict(tool)
        for tool in tools
    ]


def served(
    tools: list[dict[str, Any]] | None, choice: object, *, refuse: bool
) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Those tools that can be called here, and the kinds of the others, which are only offered.  `refuse`:
    none is left out, and `read_tools` refuses it.  Raises `BadRequest` where one that is left out is
    demanded."""
    if not tools or refuse:
        return tools, []
    check_count(len(tools))
    skipped = [kind for tool in tools if (kind := _other_kind(tool)) is not None]
    if not skipped:
        return tools, []
    left = []
    for i, tool in enumerate(tools):
        if _other_kind(tool) is None:
            _function(tool, f"tools[{i}]")  # (errors name its place in the list that was sent)
            left.append(tool)
    check_left(left, choice, skipped)
    return left or None, list(dict.fromkeys(skipped))


def allowed_here(choice: Any, *, refuse: bool) -> Any:
    """The choice without tools that the server does not have, where it lists those that are allowed.  Nothing
    left: no tool.  `refuse`: none is left out, and `narrowed` refuses it.  Raises `BadRequest` where one of
    them is demanded."""
    if refuse or not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice
    allowed = choice.get("allowed_tools", choice)
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(listed, list):
        return choice
    skipped = [kind for one in listed if (kind := _other_kind(one)) is not None]
    left = [one for one in listed if _other_kind(one) is None]
    if not skipped:
        return choice
    check_left(left, allowed.get("mode"), skipped)
    return {"type": "allowed_tools", "allowed_tools": {**allowed, "tools": left}} if left else "none"


def _other_kind(tool: object) -> str | None:
    """Of a tool that cannot be called here."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return kind if isinstance(kind, str) and kind not in KINDS else None


def check_left(left: Sequence[object], choice: object, skipped: Sequence[str]) -> None:
    """Raises `BadRequest` where a call must come and nothing is left that could be called."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if (choice == "required" and not left) or kind in skipped:
        raise BadRequest(
            f"tool_choice: this server has no {', '.join(dict.fromkeys(skipped))[:200]}; give a tool of type "
            "'function' or 'custom', and answer its calls",
            param="tool_choice",
            code="unsupported_parameter",
        )


def narrowed(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Tools that may be called, and the choice among them: `allowed_tools` leaves these of them, with its
    mode.  Any other choice stays as it is.  Raises `BadRequest`."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed: object = choice.get("allowed_tools", choice)  # (beside `type` in the Responses API)
    match allowed:
        case {"mode": "auto" | "required" as mode, "tools": [_, *_] as listed}:
            given = tools or []
            known = [_function(tool, f"tools[{i}]")["name"] for i, tool in enumerate(given)]
            names = [
                _allowed(one, known, f"tool_choice.allowed_tools.tools[{i}]") for i, one in enumerate(listed)
            ]
            return [tool for tool, name in zip(given, known, strict=True) if name in names], mode
    raise BadRequest(
        "tool_choice.allowed_tools: must be {'mode': 'auto' or 'required', 'tools': [a tool or more, each "
        "{'type': 'function', 'function': {'name': …}}]}",
        param="tool_choice",
    )


def _allowed(tool: object, known: Sequence[str], where: str) -> str:
    name = _name_in(tool)
    if not isinstance(name, str):
        raise BadRequest(
            f"{where}: must be {{'type': 'function', 'function': {{'name': …}}}}", param="tool_choice"
        )
    if name not in known:
        raise _unknown(where, name)
    return name


def _name_in(tool: object) -> object:
    """Of a function that is chosen, in chat's form or the one of Responses; None: there is none."""
    match tool:
        case (
            {"type": "function", "function": {"name": name}}
            | {"type": "custom", "custom": {"name": name}}
            | {"type": "function" | "custom", "name": name}
        ):
            return name
    return None


def _unknown(where: str, name: str) -> BadRequest:
    return BadRequest(
        f"{where}: there is no tool {name[:140]!r} in tools; choose one that is there", param="tool_choice"
    )


def _encoded(schemas: Mapping[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(schemas)
    except (TypeError, ValueError, RecursionError) as error:  # (a Python program's)
        raise BadRequest(f"tools: parameters must be a JSON schema: {error}", param="tools") from None


def check_name(name: object, where: str) -> None:
    """Of a function.  Raises `BadRequest`."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where}: it is missing; give the function a name", param="tools")
    if not _NAME.match(name):
        raise BadRequest(
            f"{where}: {name[:140]!r} must be of letters, digits, '_', '-', '.', ':' and '/', "
            "at most 128 of them",
            param="tools",
        )


def _function(tool: object, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"{where}: must be an object with type and function", param="tools")
    kind = "function" if tool.get("type") is None else tool["type"]
    if kind == "custom":
        custom = read_custom(tool.get("custom"), f"{where}.custom")
        check_name(custom.name, f"{where}.custom.name")
        return as_function(custom)
    if kind != "function":
        raise BadRequest(
            f"{where}.type: {str(kind)[:50]!r} is not supported; only 'function' and 'custom' are",
            param="tools",
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where}.function: give an object with at least a name", param="tools")
    check_name(function.get("name"), f"{where}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise BadRequest(f"{where}.function.parameters: must be a JSON schema, an object", param="tools")
    of = (parameters or {}).get("type", "object")
    if of not in ("object", ["object"]):
        raise BadRequest(
            f"{where}.function.parameters.type: {str(of)[:50]!r} must be 'object', as arguments of calls are",
            param="tools",
        )
    if not isinstance(function.get("strict"), bool | None):
        raise BadRequest(f"{where}.function.strict: must be true or false", param="tools")
    if not isinstance(function.get("description"), str | None):
        raise BadRequest(f"{where}.function.description: must be a text", param="tools")
    return function


def _choice(choice: object, names: list[str]) -> tuple[str, bool]:
    """(what was chosen, whether that is a tool's name)."""
    match choice:
        case None:
            return "auto", False
        case "none" | "auto":
            return choice, False
        case "required" if names:
            return "required", False
        case "required":
            raise BadRequest("tool_choice: 'required' needs tools; give some", param="tool_choice")
        case {"type": "function" | "custom"} if isinstance(name := _name_in(choice), str):
            if name not in names:
                raise _unknown("tool_choice", name)
            return name, True
    raise BadRequest(
        "tool_choice: must be 'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or "
        "{'type': 'allowed_tools', 'allowed_tools': {'mode': …, 'tools': […]}}",
        param="tool_choice",
    )


def _types_of(schema: object) -> dict[str, tuple[str, ...]]:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(properties, Mapping):
        return {}
    return {
        str(key): tuple(dict.fromkeys(_json_type(one) for one in _types(value, schema, 0)))
        for key, value in properties.items()
    }


def _json_type(name: str) -> str:
    """Of a type by a name that people write."""
    lower = name.strip().lower()
    return _NAMES.get(lower, lower)


def _types(schema: object, root: object, depth: int) -> list[str]:
    """What the schema says of types, as far as it is simple."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [one for one in declared if isinstance(one, str)]
    for several in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(several)
        for one in choices[:_MAX_CHOICES] if isinstance(choices, list) else ():
            types += _types(one, root, depth + 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        there: object = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            there = there.get(key) if isinstance(there, Mapping) else None
        types += _types(there, root, depth + 1)
    if not types:
        values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ())]
        values += [schema["const"]] if "const" in schema else []
        types += [_KINDS.get(type(value), "string") for value in values]
        types += ["object"] if "properties" in schema else ["array"] if "items" in schema else []
    if schema.get("nullable") is True:
        types.append("null")
    return types


_KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_NAMES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short"), "integer"),
    **dict.fromkeys(("unsigned", "whole"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double", "decimal", "num"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "sequence", "set"), "array"),
    **dict.fromkeys(("none", "nonetype"), "null"),
}
"""Types by names of other languages, which tools' schemas have."""
