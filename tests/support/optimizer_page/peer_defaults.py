"""The arguments and defaults of other libraries' optimizers, as their signatures give them.

    .venv-peers/bin/python tests/support/optimizer_page/peer_defaults.py

reads them from the installed libraries and writes `peer_defaults.toml`. No Python
that runs this has TensorFlow 1: what stands in `tf_defaults.toml` was read in its documentation.
"""

from __future__ import annotations

import inspect
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peers
from optimizer_page import entries, exports

from gpuopt.optimizers.base.declared import OTHER_NAMES

COMMAND = ".venv-peers/bin/python tests/support/optimizer_page/peer_defaults.py"
FOLDER = Path(__file__).parent
FILE = FOLDER / "peer_defaults.toml"
OF_TF = FOLDER / "tf_defaults.toml"
REQUIRED = "required"
# The names that others have for our arguments, best first.
ALIASES = {**OTHER_NAMES, "beta1": (*OTHER_NAMES["beta1"], "momentum")}
Signature = dict[str, Any]


def signatures() -> dict[str, Signature]:
    """Returns the arguments of each peer with their defaults, but for those of TensorFlow 1."""
    return _read(FILE)


def all_signatures() -> dict[str, Signature]:
    return {**signatures(), **_read(OF_TF)}


def versions() -> dict[str, str]:
    """Returns the version of each library whose signatures these are."""
    return {
        library: found
        for file in (FILE, OF_TF)
        for library, found in tomllib.loads(file.read_text())["versions"].items()
    }


def _read(file: Path) -> dict[str, Signature]:
    return {
        name: value for name, value in tomllib.loads(file.read_text()).items() if name != "versions"
    }


def read_signature(peer: str) -> Signature:
    """Returns the arguments of an installed optimizer that correspond to ours."""
    parameters = inspect.signature(peers.imported(peer)).parameters
    every = {name: as_toml(parameter.default) for name, parameter in parameters.items()}
    found = (
        beside(argument.name, every)
        for optimizer in exports.optimizers()
        if peer in entries.entry_of(optimizer.__name__).peers
        for argument in exports.own_arguments(optimizer)
    )
    theirs = {each[0].partition("[")[0] for each in found if each}
    return {name: value for name, value in every.items() if name in theirs}


def as_toml(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return REQUIRED
    if isinstance(default, tuple):
        return list(map(as_toml, default))
    return default if isinstance(default, bool | int | float) else str(default)


def beside(name: str, signature: Signature) -> tuple[str, Any] | None:
    """Returns the argument of a peer that corresponds to one of ours, and its default."""
    for candidate in (name, *ALIASES.get(name, ())):
        key, _, index = candidate.rstrip("]").partition("[")
        if key in signature:
            value = signature[key]
            return candidate, value[int(index)] if index else value
    return None


def main() -> None:
    installed = [peer for peer in entries.every_peer() if not peer.startswith("tf.")]
    lines = [f"# Written by `{COMMAND}`.\n\n[versions]\n"]
    for library in sorted({peer.partition(".")[0] for peer in installed}):
        # Without the build, as in 2.13.0+cpu.
        lines.append(f'{library} = "{version(library).partition("+")[0]}"\n')
    for peer in installed:
        lines.append(f'\n["{peer}"]\n')
        lines += [f"{name} = {_literal(value)}\n" for name, value in read_signature(peer).items()]
    FILE.write_text("".join(lines))


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    main()
