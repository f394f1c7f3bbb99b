"""The codecs of an optimizer's slots, and conversion of states saved with other codecs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from gpuopt.backends.backend import compute_type
from gpuopt.codecs import Byte, Codec, Coded, Form, Split, codec_of
from gpuopt.computed_once import computed_once
from gpuopt.fp_warnings import ignore_fp_warnings
from gpuopt.rules.slot_codes import Coding, scales_name
from gpuopt.variables.storage import describe
from gpuopt.variables.variable import FLOAT_DTYPES, Variable

Array = np.ndarray[Any, Any]
SlotDtype = Literal["bfloat16", "float32"]
SlotForm = Literal["root", "bitsandbytes"]
Masters = Literal["float32", "remainder"]

# The name of the slot of master copies.
MASTER: Final = "master"

_DOUBLE = np.dtype(np.float64)
_SINGLES = FLOAT_DTYPES - {_DOUBLE}


class CodedForm(NamedTuple):
    """The codecs of slots in 8 bits, both of one map.

    Attributes:
        numbers: Of slots whose numbers may be below 0.
        squares: Of sums of squares.
    """

    numbers: Coded
    squares: Coded


# By the value of the option `slot_form`.
CODED_FORMS: dict[str, CodedForm] = {
    "root": CodedForm(Byte(Coding.SIGNED), Byte(Coding.ROOTS)),
    "bitsandbytes": CodedForm(
        Byte(Coding.SIGNED, ends_at_rows=False), Byte(Coding.SQUARES, ends_at_rows=False)
    ),
}
# The names of entries that describe a saved state.
_BITS, _BLOCK, _MAP, _CODINGS = "slot_bits", "slot_block", "slot_map", "slot_codings"
_FORM, _MASTERS, _DTYPE = "slot_form", "masters", "slot_dtype"


class SlotCodecs(dict[str, Codec]):
    """The codecs of slots that are not stored like their variable, by name. Immutable.

    Master copies are the slot `MASTER`. A slot without an entry has the type of its variable, or of
    the variable's master copy.
    """

    @computed_once
    def coded(self) -> dict[str, Coded]:
        """The codecs of slots in 8 bits."""
        return {name: codec for name, codec in self.items() if isinstance(codec, Coded)}

    @computed_once
    def masters(self) -> Masters | None:
        """The kind of master copies of 16-bit variables; None if there are none."""
        if MASTER not in self:
            return None
        return "remainder" if isinstance(self[MASTER], Split) else "float32"

    @property
    def slot_dtype(self) -> np.dtype[Any] | None:
        """The option `slot_dtype`; None if it was not given."""
        types = [
            codec.dtypes[0] for name, codec in self.items() if name not in (*self.coded, MASTER)
        ]
        return types[0] if types else None

    @property
    def slot_form(self) -> str | None:
        """The option `slot_form` of slots in 8 bits; None if there are none."""
        codecs = {*self.coded.values()}
        # Not by a generator: Ctrl-C in one that `next` has left is lost.
        for name, forms in CODED_FORMS.items():
            if codecs & {*forms}:
                return name
        return None

    def of(self, slot_name: str, dtype: np.dtype[Any]) -> Codec:
        """Returns the codec of a slot of a variable of this type; not of a master copy."""
        if slot_name in self:
            return self[slot_name]
        return codec_of(kept_dtype(dtype, self.masters), np.dtype(compute_type(dtype)))

    def array_names(self, slot_names: Iterable[str]) -> list[str]:
        """Lists the names of the slots' arrays in a state, in order."""
        names = list(slot_names)
        return [*names, *(scales_name(name) for name in names if name in self.coded)]

    def without_scales(self, names: Iterable[str]) -> list[str]:
        """Returns a state's names of arrays without those of scales."""
        scales = {*map(scales_name, self.coded)}
        return [name for name in names if name not in scales]

    def form(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        starts: Mapping[str, float] = MappingProxyType({}),
        *,
        by_rows: bool = False,
    ) -> Form:
        """Returns the form of an array of a slot.

        Args:
            name: One of `array_names`.
            shape: The slot's.
            dtype: The variable's.
            starts: The initial value of each slot; by default 0.
            by_rows: Whether blocks of codes end at rows, if there are rows.
        """
        for slot_name, codec in self.coded.items():
            if name in (slot_name, scales_name(slot_name)):
                ends = by_rows and len(shape) > 0
                start = starts.get(slot_name, 0.0)
                of_codes, of_scales = codec.forms(shape, start, by_rows=ends)
                return of_codes if name == slot_name else of_scales
        return self.of(name, dtype).forms(shape, starts.get(name, 0.0))[0]

    def check_types(self, variables: Sequence[Variable]) -> None:
        """Raises TypeError for variables whose slots would lose most of their digits."""
        for variable in variables:
            if variable.dtype == np.float64 and self.coded:
                raise TypeError(
                    f'slot_bits=8: "{variable.name}" is float64, and its slots would have two '
                    "digits: use float32, or an optimizer with slot_bits=32 for it"
                )
            if variable.dtype == np.float64 and self.slot_dtype is not None:
                raise TypeError(
                    f'slot_dtype="{self.slot_dtype}": "{variable.name}" is float64, and its slots '
                    "would lose most of their digits: use float32, or an optimizer without "
                    "slot_dtype for it"
                )

    def described(self) -> dict[str, Any]:
        """Returns the entries of a saved state that describe its slots."""
        found: dict[str, Any] = {}
        if self.coded:
            codings = {name: each.name for name, each in self.coded.items()}
            [(block, slot_map)] = {(each.per_block, each.map) for each in self.coded.values()}
            found = {_BITS: 8, _BLOCK: block, _MAP: slot_map, _FORM: self.slot_form}
            found[_CODINGS] = codings
        if self.masters is not None:
            found[_MASTERS] = self.masters
        if self.slot_dtype is not None:
            found[_DTYPE] = self.slot_dtype.name
        return found


def has_master(dtype: np.dtype[Any]) -> bool:
    """Whether a variable of this type gets a master copy: it has 16 bits."""
    return dtype != np.dtype(compute_type(dtype))


def kept_dtype(dtype: np.dtype[Any], masters: Masters | None) -> np.dtype[Any]:
    """Returns the type of a variable's master copy; the variable's own if there is none."""
    return dtype if masters is None else np.dtype(compute_type(dtype))


def converted_slots(
    saved: Mapping[str, Mapping[str, Any]],
    hyperparameters: Any,
    here: SlotCodecs,
    own_names: Sequence[str] | None,
    variables: Mapping[str, Variable],
) -> dict[str, dict[str, Any]]:
    """Returns the slots of a saved state as an optimizer stores them.

    A slot is decoded and encoded again if the saved or the new codec is not that of its variable.
    If both are, later checks compare the types.

    Args:
        saved: The slots, by name and the variable's name.
        hyperparameters: Those of the saved state, with the options of its slots.
        here: The optimizer's codecs.
        own_names: The names of its own slots; None for all. The types of other slots, which
            wrappers keep, do not depend on options.
        variables: The variables that exist, by their names in the state. Slots of all others become
            those of float32 variables.

    Raises:
        ValueError: the saved slots have unknown blocks, an unknown map, or are damaged.
    """
    described = hyperparameters if isinstance(hyperparameters, Mapping) else {}
    slots = {name: dict(by_variable) for name, by_variable in saved.items()}
    if not here and not any(map(described.get, (_CODINGS, _MASTERS, _DTYPE))):
        return slots
    copies = slots.get(MASTER, {}) if described.get(_MASTERS) else {}
    decoded = _decode(slots, described, here)
    own = slots if own_names is None else own_names
    others = {MASTER, *(scales_name(name) for name in here.coded)}
    for slot_name in [name for name in slots if name in own and name not in others]:
        for name, value in slots[slot_name].items():
            array = np.asarray(value)
            dtype = variables[name].dtype if name in variables else np.dtype(np.float32)
            codec = here.of(slot_name, dtype)
            is_apart = slot_name in decoded or bool(described.get(_DTYPE))
            is_apart_here = slot_name in here
            if here.masters is None:
                # Also where no step has made the copy yet that belongs to the slot.
                is_apart |= bool(described.get(_MASTERS))
            else:
                is_apart_here |= dtype != _DOUBLE
            names = [slot_name]
            if codec.per_block:
                is_encoded = array.dtype.kind in "fV"
                names.append(scales_name(slot_name))
            else:
                # Those of float64 variables pass to no other type.
                is_encoded = array.dtype in _SINGLES and (is_apart or is_apart_here)
            if is_encoded:
                numbers = codec_of(array.dtype, codec.real).numbers([array])
                stored = ignore_fp_warnings(partial(codec.new_arrays, numbers))
                for part, new in zip(names, stored, strict=True):
                    slots.setdefault(part, {})[name] = new
    if here.masters is None and described.get(_MASTERS):
        slots.pop(MASTER, None)
    for name, variable in variables.items():
        if not has_master(variable.dtype):
            copies.pop(name, None)
    return slots


def _decode(
    slots: dict[str, dict[str, Any]], described: Mapping[str, Any], here: SlotCodecs
) -> list[str]:
    """Decodes slots in place whose codes the optimizer does not have; returns their names."""
    theirs = described.get(_CODINGS)
    if theirs is None:
        return []
    found = [described.get(name) for name in (_BITS, _BLOCK, _MAP)]
    known = sorted({(codec.per_block, codec.map) for codec in _known_codecs().values()})
    if found not in [[8, *each] for each in known] or not isinstance(theirs, Mapping):
        blocks = " or ".join(f"of {block} by the map {name!r}" for block, name in known)
        raise ValueError(
            f"the saved slots are of {found[0]!r} bits, in blocks of {found[1]!r} by the map "
            f"{found[2]!r}; known codecs are of 8 bits, in blocks {blocks}. A codec of your own is "
            "to be known before a state is loaded; one of gpuopt's is of a later version"
        )
    ours = {name: each.name for name, each in here.coded.items()}
    others = [name for name in theirs if ours.get(name) != theirs[name]]
    for name in others:
        scales = slots.pop(scales_name(name), {})
        for of, value in slots.get(name, {}).items():
            what = f'slot "{name}" of "{of}"'
            slots[name][of] = decoded_array(value, scales.get(of), theirs[name], what)
    return others


def decoded_array(codes: Any, scales: Any, coding: str, what: str) -> Array:
    """Returns the numbers of a saved slot in 8 bits.

    Raises:
        ValueError: the arrays are not such a slot.
    """
    arrays = np.asarray(codes), np.asarray(scales)
    shape, by_rows = arrays[0].shape, arrays[0].ndim > 0 and arrays[1].ndim == 2
    known = _known_codecs()
    if coding not in known:
        raise ValueError(f"{what} has the coding {coding!r}; known are {sorted(known)}")
    codec = known[coding]
    expected = [(form.shape, form.dtype) for form in codec.forms(shape, by_rows=by_rows)]
    if [(each.shape, each.dtype) for each in arrays] != expected:
        raise ValueError(
            f"{what} must have codes of uint8 and scales of float32 {expected[1][0]}; it has codes "
            f"{describe(codes)} and scales {describe(scales)}"
        )
    return codec.numbers(arrays)


def _known_codecs() -> dict[str, Coded]:
    """Returns the codecs of slots in 8 bits, by their names in saved states."""
    return {codec.name: codec for form in CODED_FORMS.values() for codec in form}
