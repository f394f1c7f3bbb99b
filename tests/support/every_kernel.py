"""Lists every kernel that is ever compiled."""

from __future__ import annotations

import os
from functools import cache

from dtypes import TYPES_OF_KERNELS
from every_optimizer import (
    rules_of_each_shape,
    rules_of_missed_steps,
    rules_of_other_rows_alone,
    update_rules,
)

from gpuopt.backends.cuda import kernels
from gpuopt.backends.cuda.kernel import Kernel
from gpuopt.backends.cuda.mixed import SPLIT, Mixed, Storage
from gpuopt.codecs import Coded
from gpuopt.optimizers.base.slot_options import coded_slots
from gpuopt.optimizers.gradient_descent import gradient_descent
from gpuopt.rules.accumulation import add_to_sum, begin_sum
from gpuopt.rules.averaged import averaged, moving_average
from gpuopt.rules.cautious import cautious
from gpuopt.rules.clipped import clipped
from gpuopt.rules.rounded import rounded
from gpuopt.rules.scaled import scaled
from gpuopt.rules.staged import StagedRule
from gpuopt.rules.update_rule import UpdateRule
from gpuopt.state.slot_codecs import SlotForm

IS_FULL = bool(os.environ.get("GPUOPT_ALL_KERNELS"))

DTYPES = TYPES_OF_KERNELS
INDICES = ["int32", "int64"]
KEYS = ["uint32", "uint64"]
# Of a variable and its slots, and of a gradient.
MIXTURES = [
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float16"),
]

CODED_STORAGES: list[Storage] = [
    "float32",
    "float16",
    "bfloat16",
    Mixed("bfloat16", "bfloat16", "float32"),
]

STORAGES_OF_ROUNDING: list[Storage] = [
    "bfloat16",
    Mixed("bfloat16", "bfloat16", "float32"),
    Mixed("float32", "bfloat16", "float32"),
    Mixed("bfloat16", "bfloat16", "bfloat16", SPLIT),
]


def rules_to_compile() -> list[UpdateRule]:
    """Returns the rules whose kernels NVRTC compiles: unless asked for all, the extremes."""
    rules = update_rules()
    if IS_FULL:
        return rules
    # A rule with decay is its base and one more scalar.
    by_slots = sorted(
        (rule for rule in rules if not isinstance(rule, StagedRule) and not rule.sums),
        key=lambda rule: len(rule.slots),
    )
    most_scalars = max(by_slots, key=lambda rule: len(rule.scalars))
    with_sums = max((rule for rule in rules if rule.sums), key=lambda rule: len(rule.scalars))
    of_rows = max((rule for rule in rules if rule.row_slots), key=lambda rule: len(rule.slots))
    extremes = [by_slots[0], by_slots[-1], most_scalars, with_sums, of_rows]
    return list(dict.fromkeys([*rules_of_each_shape(), *extremes]))


def kernels_of(rule: UpdateRule) -> list[Kernel]:
    """Those for several groups are the same but for where scalars are: a rule of each shape's."""
    if rule in rules_of_other_rows_alone():
        return [kernels.update_other_rows(rule, dtype) for dtype in DTYPES]
    if rule.sums:
        return [kernel for dtype in DTYPES for kernel in kernels_of_dense_update(rule, dtype)]
    if rule.row_slots:
        return [
            kernel
            for dtype in DTYPES
            for kernel in (
                kernels.dense_update(rule, dtype),
                *(kernels.sparse_update(rule, dtype, key) for key in KEYS),
                kernels.sparse_update(rule, dtype, "uint32", has_groups=True),
            )
        ]
    return [
        kernel
        for dtype in DTYPES
        for kernel in (
            kernels.dense_update(rule, dtype),
            kernels.update_other_rows(rule, dtype),
            *(kernels.sparse_update(rule, dtype, key) for key in KEYS),
            *(kernels_of_groups(rule, dtype) if rule in _shapes() else ()),
            *kernels_of_late_rows(rule, dtype),
        )
    ]


def kernels_of_groups(rule: UpdateRule, dtype: str) -> list[Kernel]:
    return [
        kernels.dense_update(rule, dtype, has_groups=True),
        # Several tables together have keys of 32 bits.
        kernels.sparse_update(rule, dtype, "uint32", has_groups=True),
    ]


def kernels_of_late_rows(rule: UpdateRule, dtype: str) -> list[Kernel]:
    missed = _missed().get(rule)
    if missed is None:
        return []
    return [
        *(kernels.late_update(rule, missed, dtype, key) for key in KEYS),
        kernels.late_update(rule, missed, dtype, "uint32", has_groups=True),
        *(kernels.bring_up_rows(missed, missed, dtype, index) for index in INDICES),
    ]


_missed = cache(rules_of_missed_steps)


@cache
def _shapes() -> list[UpdateRule]:
    return update_rules() if IS_FULL else rules_of_each_shape()


def kernels_of_several_types() -> list[Kernel]:
    """Lists kernels of updates whose arrays have several types: of a rule of each kind."""
    by_name = {rule.name: rule for rule in update_rules()}
    adam, lamb, row_wise = (by_name[name] for name in ("adam", "lamb", "row_wise_adagrad"))
    return [
        kernel
        for storage in [
            *(Mixed(var, var, gradient) for var, gradient in MIXTURES[1:4]),
            *(Mixed("float32", "float32", copy, copy) for copy in ("float16", "bfloat16")),
            Mixed("bfloat16", "float32", "bfloat16", SPLIT),
        ]
        for kernel in (
            kernels.dense_update(adam, storage),
            kernels.dense_update(clipped(adam), storage, has_groups=True),
            kernels.dense_update(scaled(adam), storage, has_groups=True),
            kernels.update_other_rows(scaled(adam), storage, has_groups=True),
            kernels.sum_terms(lamb, storage),
            kernels.dense_update(row_wise, storage),
            kernels.sparse_update(adam, storage, "uint32"),
            kernels.update_other_rows(adam, storage),
            kernels.late_update(adam, adam, storage, "uint32"),
        )
    ]


def kernels_of_measured_inputs() -> list[Kernel]:
    """Lists kernels of rules whose sums are computed as gradients are measured."""
    rules = [rule for rule in update_rules() if rule.degrees]
    storages: list[Storage] = [
        *DTYPES,
        *(Mixed(var, var, "float32") for var in ("float16", "bfloat16")),
        *(Mixed("float32", "float32", copy, copy) for copy in ("float16", "bfloat16")),
        Mixed("float32", "bfloat16", "float32"),
        Mixed("bfloat16", "float32", "bfloat16", SPLIT),
    ]
    return [
        kernel
        for rule in rules
        for storage in storages
        for kernel in (
            *(kernels.measure_inputs(rule, storage, decides) for decides in (False, True)),
            *(
                kernels.dense_update(made(of), storage, is_given_sums=True)
                for made in (clipped, scaled)
                for of in (rule, averaged(rule))
            ),
        )
    ]


def coded(rule: UpdateRule, form: SlotForm = "root") -> tuple[Coded, ...]:
    """Returns the codecs of a rule's slots in 8 bits."""
    return tuple(coded_slots(rule, form).values())


def kernels_of_codes() -> list[Kernel]:
    """Lists kernels of slots in 8 bits: of a rule of each kind that has such slots."""
    by_name = {rule.name: rule for rule in update_rules()}
    of_one_slot = [by_name["momentum"], by_name["lion"]]
    listed: list[Kernel] = []
    of_two = by_name["adam"]
    for rule in (*of_one_slot, of_two, clipped(of_two), scaled(of_one_slot[0]), scaled(of_two)):
        codecs = coded(rule)
        for storage in CODED_STORAGES:
            listed.append(kernels.coded_update(rule, codecs, storage))
            listed += [kernels.sparse_update(rule, storage, key, True, codecs) for key in KEYS]
            if rule is not clipped(of_two):
                is_scaled = rule.is_scaled
                listed.append(kernels.update_other_rows(rule, storage, is_scaled, codecs))
    with_masters = Mixed("float32", "float32", "bfloat16", "bfloat16")
    with_remainders = Mixed("bfloat16", "bfloat16", "bfloat16", SPLIT)
    for rule, storage in (
        (of_two, with_masters),
        (of_two, with_remainders),
        (rounded(of_two), "bfloat16"),
    ):
        codecs = coded(rule)
        listed.append(kernels.coded_update(rule, codecs, storage))
        listed.append(kernels.sparse_update(rule, storage, "uint32", True, codecs))
    for storage in ("float32", "bfloat16", with_remainders):
        late = rounded(of_two) if storage == "bfloat16" else of_two
        codecs = coded(late)
        listed += [
            *(kernels.late_update(late, of_two, storage, key, True, codecs) for key in KEYS),
            kernels.bring_up_rows(late, of_two, storage, "int64", codecs),
        ]
    sums = cautious(by_name["adam"])
    of_squares = coded(by_name["adam"], "bitsandbytes")
    of_three, with_norms = by_name["ams_grad"], by_name["lamb"]
    return [
        *listed,
        kernels.coded_update(of_three, coded(of_three), "float32"),
        kernels.sparse_update(of_three, "float32", "uint32", True, coded(of_three)),
        kernels.sum_coded_terms(with_norms, coded(with_norms), "float32"),
        kernels.coded_update(by_name["adam"], of_squares, "float32"),
        *(
            make(sums, coded(sums), storage)
            for make in (kernels.sum_coded_terms, kernels.coded_update)
            for storage in CODED_STORAGES
        ),
    ]


def kernels_with_averages() -> list[Kernel]:
    """Lists kernels of dense updates that move averages, too: of a rule of each kind."""
    by_name = {rule.name: rule for rule in update_rules()}
    names = ("adam", "adagrad_da", "lamb", "partial_row_wise_adam")
    bases = [averaged(by_name[name]) for name in names]
    return [
        kernel
        for base in bases
        for rule in (base, clipped(base), scaled(base))
        for dtype in ("float32", "float64")
        for kernel in (
            *kernels_of_dense_update(rule, dtype),
            *(
                []
                if rule.sums or rule.row_slots
                else [kernels.dense_update(rule, dtype, has_groups=True)]
            ),
        )
    ]


def kernels_with_averages_of_several_types() -> list[Kernel]:
    """Lists those of 16-bit variables, slots of another type and in 8 bits, and averages alone."""
    by_name = {rule.name: rule for rule in update_rules()}
    names = "adam", "lamb", "momentum", "partial_row_wise_adam"
    adam, lamb, momentum, row_wise = (averaged(by_name[name]) for name in names)
    storages: list[Storage] = [
        "float16",
        "bfloat16",
        Mixed("float32", "bfloat16", "float32"),
        Mixed("float16", "bfloat16", "float16"),
        Mixed("float32", "bfloat16", "float16", "float16"),
        Mixed("bfloat16", "float32", "bfloat16", SPLIT),
        Mixed("bfloat16", "bfloat16", "bfloat16", SPLIT),
    ]
    halves = "float16", "bfloat16"
    alone: list[Storage] = ["float32", "float64"]
    alone += [Mixed("float32", "float32", value) for value in halves]
    return [
        *(
            kernel
            for storage in storages
            for kernel in (
                kernels.dense_update(adam, storage),
                kernels.dense_update(clipped(adam), storage, has_groups=True),
                kernels.dense_update(scaled(adam), storage, has_groups=True),
                kernels.sum_terms(lamb, storage),
                kernels.dense_update(lamb, storage, has_groups=True),
            )
        ),
        *(kernels.dense_update(row_wise, storage) for storage in halves),
        *(
            kernels.coded_update(rule, coded(rule.rule), storage)
            for rule in (momentum, adam)
            for storage in CODED_STORAGES
        ),
        *(
            kernels.coded_update(scaled(adam), coded(adam.rule), storage)
            for storage in CODED_STORAGES
        ),
        *(
            kernels.dense_update(averaged(by_name["gradient_descent"]), Mixed(var, "float32", var))
            for var in halves
        ),
        *(kernels.dense_update(moving_average, storage) for storage in alone),
        *(
            kernels.dense_update(scaled(moving_average), storage, has_groups=True)
            for storage in alone
        ),
    ]


def kernels_with_rounding() -> list[Kernel]:
    """Lists kernels that round what they write stochastically: of a rule of each kind."""
    by_name = {rule.name: rule for rule in update_rules()}
    adam, lamb, most_slots = (by_name[name] for name in ("adam", "lamb", "ams_grad"))
    of_averages = rounded(averaged(adam)), rounded(averaged(most_slots))
    updates: list[tuple[UpdateRule, Storage]] = [
        *((rule, "bfloat16") for rule in (rounded(adam), rounded(most_slots))),
        *((made(rounded(adam)), "bfloat16") for made in (clipped, scaled)),
        *((rounded(rule), Mixed("bfloat16", "bfloat16", "float32")) for rule in (adam, most_slots)),
    ]
    return [
        kernels.sum_terms(rounded(lamb), "bfloat16"),
        kernels.dense_update(rounded(lamb), "bfloat16"),
        *(
            kernel
            for rule in of_averages
            for storage in STORAGES_OF_ROUNDING
            for kernel in (
                kernels.dense_update(rule, storage),
                kernels.dense_update(clipped(rule), storage, has_groups=True),
                kernels.dense_update(scaled(rule), storage, has_groups=True),
            )
        ),
        *(
            kernel
            for rule, storage in updates
            for kernel in (
                kernels.dense_update(rule, storage),
                kernels.dense_update(rule, storage, has_groups=True),
                *(kernels.sparse_update(rule, storage, key) for key in KEYS),
                kernels.update_other_rows(rule, storage),
            )
        ),
    ]


def kernels_of_slots_in_bfloat16() -> list[Kernel]:
    """Lists kernels of variables and master copies that have slots in bfloat16."""
    by_name = {rule.name: rule for rule in update_rules()}
    adam, lamb = by_name["adam"], by_name["lamb"]
    storages = [
        Mixed("float32", "bfloat16", "float32"),
        Mixed("float32", "bfloat16", "bfloat16", "bfloat16"),
        Mixed("bfloat16", "bfloat16", "bfloat16", SPLIT),
    ]
    return [
        kernel
        for storage in storages
        for kernel in (
            kernels.dense_update(adam, storage),
            kernels.dense_update(clipped(adam), storage, has_groups=True),
            kernels.dense_update(rounded(adam), storage),
            kernels.sum_terms(rounded(lamb), storage),
            kernels.sparse_update(adam, storage, "uint32"),
            kernels.sparse_update(rounded(adam), storage, "uint32"),
            kernels.update_other_rows(rounded(adam), storage),
        )
    ]


def kernels_of_accumulation() -> list[Kernel]:
    """Lists kernels that add gradients of each type to their sums."""
    types: list[Storage] = ["float32", "float64"]
    types += [Mixed("float32", "float32", gradient) for gradient in ("float16", "bfloat16")]
    return [kernels.dense_update(rule, each) for rule in (begin_sum, add_to_sum) for each in types]


def kernels_without_rule() -> list[Kernel]:
    return [
        *(kernels.check_rows(), kernels.gather_rows(), kernels.copy_rows()),
        *(kernels.add_squares(real) for real in ("float32", "float64")),
        *(
            make(dtype)
            for make in (kernels.sum_squares, kernels.scale_to_norm, kernels.measure)
            for dtype in DTYPES
        ),
        *(kernels.measure(dtype, decides=True) for dtype in DTYPES),
        *(kernels.measure_rows(dtype, key, decides=True) for dtype in DTYPES for key in KEYS),
        *(kernels.join_sums(decides) for decides in (False, True)),
        *(kernels.count_digits(source) for source in (*INDICES, *KEYS)),
        *(kernels.check_and_count_digits(index) for index in INDICES),
        *(kernels.move_rows(index, key) for index in INDICES for key in KEYS),
        *(kernels.move_rows(key, key) for key in KEYS),
        *(kernels.sort_few_rows(index, key) for index in INDICES for key in KEYS),
        *(kernels.mark_rows(key) for key in KEYS),
        *(
            make(dtype, key)
            for make in (kernels.sum_pieces, kernels.sum_runs, kernels.measure_rows)
            for dtype in DTYPES
            for key in KEYS
        ),
    ]


def types_of(kernel: Kernel) -> set[str]:
    """Returns the types of C++ of a kernel's arrays and keys; several types of arrays as one."""
    given = {name: str(value) for name, value in kernel.types.items()}
    others = {given[name] for name in ("Storage", "Key", "Source", "Index") if name in given}
    if kernel.rule is None:
        return others
    arrays = [given[name] for name in ("Var", "Slot", "Gradient", "Companion")]
    is_one_type = len(set(arrays[:3])) == 1 and arrays[3] == "gpuopt::Alone"
    return others | {arrays[0] if is_one_type else f"<{', '.join(arrays)}>"}


def has_groups(kernel: Kernel) -> bool:
    """Whether it is given the scalars of several groups."""
    given = str(kernel.types.get("GivenScalars", ""))
    return given.startswith(
        ("gpuopt::FewScalars", "gpuopt::ClippedScalars", "gpuopt::ScaledScalars")
    )


def is_of_large_table(kernel: Kernel) -> bool:
    """Whether it is of tables with 2**32 rows or more alone."""
    return "unsigned long long" in kernel.types.values()


def kernels_of_dense_update(rule: UpdateRule, dtype: str) -> list[Kernel]:
    """Lists the kernels that a first dense update launches."""
    if rule.sums:
        return [
            kernels.sum_terms(rule, dtype),
            kernels.dense_update(rule, dtype, has_groups=True),
        ]
    if rule.row_slots:
        return [kernels.dense_update(rule, dtype)]
    return [kernels.dense_update(rule, dtype)]


def kernels_of_sparse_update(rule: UpdateRule, dtype: str) -> list[Kernel]:
    """Lists the kernels that a first sparse update may launch, for a table below 2**32 rows."""
    if rule.sums:  # the rows are added up first
        return [
            *kernels_of_sparse_update(gradient_descent, dtype),
            *kernels_of_dense_update(rule, dtype),
        ]
    return [
        *(kernels.check_rows(), kernels.check_and_count_digits("int64")),
        *(kernels.move_rows("int64", "uint32"), kernels.count_digits("uint32")),
        *(kernels.move_rows("uint32", "uint32"), kernels.sort_few_rows("int64", "uint32")),
        *(kernels.sum_pieces(dtype, "uint32"), kernels.mark_rows("uint32")),
        *([] if rule.row_slots else [kernels.update_other_rows(rule, dtype)]),
        kernels.sparse_update(rule, dtype, "uint32"),
    ]
