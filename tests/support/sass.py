"""What a compiled kernel does, instruction by instruction: nvdisasm's listing, read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# How many 32-bit registers an access of this width fills or reads.
_REGISTERS = {"64": 2, "128": 4}


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        name: Such as LDG.E.128.
        operands: As they stand there, the destination first.
        label: The name of a place where a branch may arrive; then there is no instruction.
        has_condition: Whether a predicate decides if it is executed.
    """

    name: str
    operands: tuple[str, ...] = ()
    label: str = ""
    has_condition: bool = False

    @property
    def loads(self) -> set[int]:
        """The registers that a load from global memory fills."""
        if not self.name.startswith("LDG"):
            return set()
        first = _registers(self.operands[0])
        count = next((n for width, n in _REGISTERS.items() if width in self.name.split(".")), 1)
        return {register + k for register in first for k in range(count)}

    @property
    def reads(self) -> set[int]:
        """The registers of its operands, the destination's too: those must not be in flight."""
        read: set[int] = set()
        for operand in self.operands[bool(self.loads) :]:
            for register in _registers(operand):
                wide = ".64" in operand or "64" in self.name or "WIDE" in self.name
                read |= {register, register + 1} if wide else {register}
        return read


def disassemble(cubin: bytes, folder: Path) -> dict[str, list[Instruction]]:
    """Returns each kernel's instructions, by its mangled name."""
    return {
        name: list(_instructions(body))
        for name, body in re.findall(
            r"\.text\.(\w+):\n(.*?)(?=\n\.section|\n//-----|\Z)",
            _listing(cubin, folder),
            re.DOTALL,
        )
    }


def lines_of(cubin: bytes, folder: Path) -> set[tuple[str, int]]:
    """Returns the lines that instructions are of: names of files without folders, and numbers."""
    found = re.findall(r'//## File "(?:.*/)?(.*?)", line (\d+)', _listing(cubin, folder, "-g"))
    return {(file, int(line)) for file, line in found}


def _listing(cubin: bytes, folder: Path, *options: str) -> str:
    path = folder / "kernels.cubin"
    path.write_bytes(cubin)
    command = [_disassembler(), "-c", *options, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loads_in_flight(instructions: Iterable[Instruction]) -> list[int]:
    """Returns, for each group of loads from global memory, how many are in flight together.

    A group ends where an instruction needs what one of its loads brings, or where a branch may
    arrive from elsewhere.
    """
    groups: list[int] = []
    count = 0
    pending: set[int] = set()
    for instruction in instructions:
        if count and (instruction.label or instruction.reads & pending):
            groups.append(count)
            count, pending = 0, set()
        loaded = instruction.loads
        if loaded:
            count += 1
            pending |= loaded
    return [*groups, count] if count else groups


def _instructions(body: str) -> Iterable[Instruction]:
    for line in body.splitlines():
        line = re.sub(r"/\*.*?\*/", "", line).strip()
        if line.startswith(".L_"):
            yield Instruction("", label=line.rstrip(":"))
        elif found := re.match(r"(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;", line):
            operands = tuple(re.split(r",\s*", found[3])) if found[3] else ()
            yield Instruction(found[2], operands, has_condition=found[1] is not None)


def _registers(operand: str) -> set[int]:
    return {int(number) for number in re.findall(r"(?<!U)\bR(\d+)", operand)}


def _disassembler() -> Path:
    from cuda.pathfinder import find_nvidia_header_directory

    return Path(find_nvidia_header_directory("cudart")).parent / "bin" / "nvdisasm"
