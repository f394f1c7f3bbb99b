"""What users may call is written down, so that a change of it is seen and meant."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import public_api
import pytest
from internal_names import INTERNAL, internal_members
from optimizer_page import exports

import gpuopt
from gpuopt.near_names import OTHER_LIBRARIES, find_near

ROOT = Path(__file__).parents[2]
# What something else on the pages has, too: another class, a library, or an argument.
NAMES_OF_OTHERS = {
    *(
        "apply_gradients",
        "averages",
        "betas",
        "check",
        "close",
        "join",
        "masters",
        "memory",
        "slot_dtype",
    ),
    *("start", "state", "stop", "variables"),
}


def test_public_names_and_signatures_are_those_that_are_written_down() -> None:
    written = public_api.PAGE.read_text().splitlines()
    changes = difflib.unified_diff(
        written, public_api.listing().splitlines(), "as written", "as they are", lineterm="", n=0
    )
    shown = "\n".join(changes)
    assert not shown, (
        f"public names have changed; if users should see that, say so in CHANGELOG.md, and write "
        f"them anew by {public_api.COMMAND}:\n{shown}"
    )


def test_internal_members_are_there_and_no_page_tells_users_of_them() -> None:
    classes = {
        base
        for module in map(importlib.import_module, public_api.MODULES)
        for name in module.__all__
        if isinstance(exported := getattr(module, name), type)
        for base in exported.__mro__
    }
    of_instances = {"plans", "ledger", "this_thread"}
    for cls in classes:
        for member in {*INTERNAL.get(cls.__name__, ()), *vars(cls).get("_unlisted", ())}:
            assert member in of_instances or hasattr(cls, member) or member in annotations_of(cls)
    assert set(INTERNAL) <= {cls.__name__ for cls in classes}
    reference = [*(ROOT / "docs" / "reference").glob("*.md")]
    guides = {*(ROOT / "docs").rglob("*.md")} - {*(ROOT / "docs" / "decisions").glob("*.md")}
    code = [ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    pages = [*sorted(guides - {*reference, ROOT / "docs" / "architecture.md"}), *code]
    members = frozenset().union(*map(internal_members, classes)) - NAMES_OF_OTHERS
    named = re.compile(rf"(?:\.|`)({'|'.join(sorted(members))})(?=[(`])")
    found = {page.name: named.findall(page.read_text()) for page in pages}
    assert not {name: those for name, those in found.items() if those}


def annotations_of(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in inspect.get_annotations(base)}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("adam", ["AdamOptimizer"]),
        ("RMSprop", ["RMSPropOptimizer"]),
        ("AdamOptimiser", ["AdamOptimizer"]),
        ("CosineDecay", ["cosine_decay"]),
        ("Variabel", ["Variable"]),
        ("SGD", ["GradientDescentOptimizer", "MomentumOptimizer", "TorchSGDOptimizer"]),
        ("NAdam", ["NadamOptimizer"]),
        ("adamw", ["AdamWOptimizer"]),
        ("clip_grad_norm_", ["clip_by_global_norm"]),
        ("CosineAnnealingLR", ["cosine_decay"]),
        ("GradScaler", ["LossScaleOptimizer", "DynamicLossScale"]),
        ("agn_optimizer", ["AGNOptimizer"]),
        ("x", []),
        ("__wrapped__", []),
    ],
)
def test_a_name_that_is_not_there_is_answered_by_those_near_it(name: str, near: list[str]) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(gpuopt, name)
    expected = f"module 'gpuopt' has no attribute '{name}'"
    assert str(raised.value) == (f"{expected}; it has {', '.join(near)}" if near else expected)
    assert raised.value.name == name


def test_what_another_library_calls_so_is_there_by_the_name_it_has_here() -> None:
    for name, here in OTHER_LIBRARIES.items():
        assert set(here) <= set(gpuopt.__all__)
        assert find_near(name, gpuopt.__all__) == list(here)


def test_names_near_it_are_looked_for_only_where_one_is_missing() -> None:
    program = (
        "import sys, gpuopt; gpuopt.AdamOptimizer; before = set(sys.modules); "
        "getattr(gpuopt, 'adam', None); print('gpuopt.near_names' in before, "
        "'gpuopt.near_names' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    assert subprocess.check_output(command, text=True) == "False True\n"


# Names that gpuopt had listed itself, by the module that lists them.
MOVED = {
    "contrib": """AGNCustomGetter AGNOptimizer DropStaleGradientOptimizer ElasticAverageCustomGetter
        ElasticAverageOptimizer ExponentialUpdateLossScaleManager FixedLossScaleManager
        LossScaleManager ModelAverageCustomGetter ModelAverageOptimizer MultitaskOptimizerWrapper
        Rows VariableClippingOptimizer clip_by_average_norm clip_by_norm
        clip_gradients_by_global_norm extend_with_decoupled_weight_decay get_cosine_decay_fn
        get_linear_decay_fn get_restart_decay_fn global_variables inverse_time_decay
        linear_cosine_decay natural_exp_decay noisy_linear_cosine_decay piecewise_constant_decay
        trainable_variables""",
    "device": "Device",
    "distributed": "ConditionalAccumulator SparseConditionalAccumulator replicate",
    "errors": """CancelledError CheckpointError DeadlineExceededError DeviceUnavailableError
        GpuoptError WorkerFailedError""",
    "interop": """optimizer_from_bitsandbytes optimizer_from_torch optimizer_to_bitsandbytes
        optimizer_to_torch""",
    "optimizers.base": "CudaSource UpdateRule",
    "schedules": "Schedule",
}


def test_a_name_that_another_module_lists_is_in_gpuopt_too_and_not_listed_there() -> None:
    for module, names in MOVED.items():
        listing = importlib.import_module(f"gpuopt.{module}")
        assert set(names.split()) <= set(listing.__all__)
        assert not set(names.split()) & set(gpuopt.__all__)
        assert all(getattr(gpuopt, each) is getattr(listing, each) for each in names.split())


def test_every_optimizer_has_a_short_name() -> None:
    for name in gpuopt.optimizers.__all__:
        short = name.removesuffix("Optimizer")
        assert getattr(gpuopt, short) is getattr(gpuopt, name)
        assert short not in gpuopt.__all__
    assert gpuopt.Adam.__name__ == "AdamOptimizer"


def test_completion_after_gpuopt_lists_public_names_and_modules_alone() -> None:
    listed = {name for name in dir(gpuopt) if not name.startswith("_")}
    assert set(gpuopt.__all__) < listed
    modules = {f"gpuopt.{name}" for name in listed - set(gpuopt.__all__)}
    assert {module.rpartition(".")[2] for module in modules} <= vars(gpuopt).keys()
    assert modules <= sys.modules.keys()
    assert {"gpuopt.contrib", "gpuopt.distributed"} <= modules
    assert len(set(gpuopt.__all__) - set(gpuopt.optimizers.__all__)) <= 31


def listed_members(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


def test_completion_on_an_optimizer_lists_what_users_need() -> None:
    assert listed_members(gpuopt.AdamOptimizer(0.1)) == {
        *("apply_gradients", "check", "compute_gradients", "flush", "get_name", "get_slot"),
        *("get_slot_names", "global_norm", "group_norms", "groups", "hyperparameters"),
        *("last_nonfinite", "load_state_dict", "minimize", "report", "state_dict", "update"),
        "variables",
    }


def test_completion_on_a_variable_lists_what_users_need() -> None:
    listed = listed_members(gpuopt.Variable([1.0]))
    assert {"assign", "device", "name", "numpy", "shape", "sum", "trainable", "value"} <= listed
    assert not listed & internal_members(gpuopt.Variable)
    assert len(listed) <= 46


def test_completion_lists_what_a_subclass_adds() -> None:
    class Mine(gpuopt.AdamOptimizer):
        _unlisted = frozenset(["hidden"])
        shown = hidden = 1

    listed = listed_members(Mine(0.1))
    assert "shown" in listed
    assert not listed & {"hidden", "betas", "state"}


def test_editors_show_the_docstring_of_an_optimizers_class(subtests: pytest.Subtests) -> None:
    """Where a constructor, or one that it overrides, has a docstring, they show that one."""
    for name in gpuopt.optimizers.__all__:
        with subtests.test(name):
            cls = getattr(gpuopt, name)
            constructors = [
                vars(each)["__init__"] for each in cls.__mro__ if "__init__" in vars(each)
            ]
            assert not [
                each for each in constructors if each is not object.__init__ and each.__doc__
            ]
            assert vars(cls)["__doc__"]
            assert "=" in exports.docstring(cls).formula, "the docstring needs a formula, indented"
            arguments = inspect.getdoc(cls).partition("\nArgs:\n")[2].partition("\n\n")[0]
            missing = set(inspect.signature(cls).parameters) - {*re.findall(r"\w+", arguments)}
            assert not missing, f"the docstring's Args lack {missing}"
