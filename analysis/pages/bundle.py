"""Cut plotly.js to the trace types that a page draws.

The bundle is a list of modules, `var NAME=W(exports=>{…});`, that run when another calls `NAME()`.
The last one registers all trace types. With fewer types, most modules are never called, those of
maps and WebGL first: they are half the bundle.
"""

import re
from collections.abc import Iterable
from functools import cache

from plotly.offline import get_plotlyjs

from analysis.plain import deflate

TESTED = "plotly.js v4.1.1"
"""The version whose cut bundles are tested. Others stay whole."""

CORE = "scatter"
"""The trace type that every bundle has."""

MODULE = re.compile(r"(?<=[;}])var ([\w$]+)=W\((?:\([\w$,]*\)|[\w$]+)=>\{")
INIT = re.compile(r"([\w$]+)=Ea\(\(\)=>\{")
"""ES modules, which follow a module; they too run when they are called."""
CALL = re.compile(r"(?<![\w$.])([\w$]+)\(\)")
REGISTER = re.compile(r"(?<=\.register\(\[)(?:[\w$]+\(\),?)+")
TYPE = re.compile(r'moduleType:"trace",name:"(\w+)"')


def pack_plotly(types: Iterable[str]) -> str:
    """Return plotly.js, deflated, with the modules that these trace types need."""
    return _pack(frozenset(types) - {CORE})


@cache
def _pack(types: frozenset[str]) -> str:
    return deflate(_cut(types).encode())


def _cut(types: frozenset[str]) -> str:
    """Return plotly.js with the modules that these trace types need, or whole if in doubt."""
    whole = get_plotlyjs()
    registered = REGISTER.search(whole)
    if TESTED not in whole or registered is None:
        return whole
    starts = list(MODULE.finditer(whole, 0, registered.start()))
    ends = [start.start() for start in starts[1:]]
    head, last = whole[: starts[0].start()], whole[starts[-1].start() :]
    modules = {
        start[1]: whole[start.start() : end] for start, end in zip(starts, ends, strict=False)
    }
    entries = {_find_type(name, modules): f"{name}()" for name in CALL.findall(registered[0])}
    if not types <= entries.keys():
        return whole
    last = last.replace(registered[0], ",".join(entries[name] for name in sorted(types)))
    kept = _reach(last, modules)
    return "".join([head, *(text for name, text in modules.items() if name in kept), last])


def _find_type(name: str, modules: dict[str, str]) -> str | None:
    """Return the trace type of a module, or of the one it is built on; None for other modules."""
    while name in modules:
        if found := TYPE.search(modules[name]):
            return found[1]
        call = CALL.search(modules[name])
        name = call[1] if call else ""
    return None


def _reach(text: str, modules: dict[str, str]) -> set[str]:
    """Return the modules that a text calls, and those that they call in turn."""
    owners = {init: name for name, part in modules.items() for init in INIT.findall(part)}
    owners |= {name: name for name in modules}
    found: set[str] = set()
    waiting = [text]
    while waiting:
        called = {owners[name] for name in CALL.findall(waiting.pop()) if name in owners} - found
        waiting += [modules[name] for name in called]
        found |= called
    return found
