"""The arguments that all optimizers share, and what users are told of them."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack, get_args

import numpy as np
import pytest
from every_optimizer import ARGUMENTS, make, optimizer_classes

import gpuopt
from gpuopt import ParameterGroup, Variable
from gpuopt import __main__ as command_line
from gpuopt.optimizers.base import (
    AllDigits,
    Common,
    Hyperparameter,
    HyperparameterName,
    Range,
    RuleOptimizer,
)
from gpuopt.optimizers.base.declared import declared, hyperparameters_of
from gpuopt.optimizers.base.names import OfGroup

pytestmark = pytest.mark.contract

if TYPE_CHECKING:
    from elsewhere import Unknown


class StepwiseOptimizer(RuleOptimizer):
    rule = gpuopt.MomentumOptimizer.rule

    def __init__(self, learning_rate: Hyperparameter = 0.5, **common: Unpack[Common]) -> None:
        super().__init__(common, learning_rate=learning_rate, decay=0.5)


@pytest.mark.parametrize("name", sorted(optimizer_classes()))
def test_every_argument_is_shown_and_taken(name: str) -> None:
    parameters = inspect.signature(optimizer_classes()[name]).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert parameters["use_locking"].default is False
    assert parameters["on_nonfinite"].default == "propagate"
    common = {"use_locking": True, "name": "mine", "on_nonfinite": "skip"}
    optimizer = make(name, {**ARGUMENTS.get(name, {}), **common})
    assert optimizer.get_name() == "mine"
    w = Variable(np.ones(2, np.float32))
    optimizer.apply_gradients([(np.float32([1, np.nan]), w)])
    assert (w.numpy() == 1).all()


def test_an_optimizer_is_named_after_its_class_unless_it_is_given_a_name() -> None:
    w = Variable(np.ones(2, np.float32), name="w")
    optimizer = StepwiseOptimizer()
    optimizer.apply_gradients([(np.ones(2, np.float32), w)])
    assert optimizer.get_name() == "Stepwise"
    assert [slot.name for slot in optimizer.variables()] == [f"{w.name}/Stepwise"]
    assert StepwiseOptimizer(name="other").get_name() == "other"
    assert gpuopt.LazyAdamOptimizer().get_name() == "Adam"  # as in TensorFlow
    for name in ("", None):
        with pytest.raises(ValueError, match="Must specify the optimizer name"):
            StepwiseOptimizer(name=name)


def test_common_arguments_show_in_a_new_optimizers_signature() -> None:
    parameters = inspect.signature(StepwiseOptimizer).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults == {
        "learning_rate": 0.5,
        "use_locking": False,
        "name": "Stepwise",
        "on_nonfinite": "propagate",
        "groups": (),
        "clip_norm": None,
        "clip_value": None,
        "clip_form": "tensorflow",
        "slot_bits": 32,
        "slot_form": "root",
        "slot_dtype": None,
        "masters": None,
        "stochastic_rounding": None,
        "averages": None,
        "gradient_dtype": "strict",
    }


def test_every_option_of_all_optimizers_is_described_in_help_and_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    described = inspect.getdoc(RuleOptimizer) or ""
    with pytest.raises(SystemExit):
        command_line.main(["show", "--help"])
    switches = capsys.readouterr().out
    parameters = inspect.signature(gpuopt.AdamWOptimizer).parameters
    common = {*inspect.signature(StepwiseOptimizer).parameters, "decay_variables"}
    for name in common - {"learning_rate", "use_locking", "name", "on_nonfinite"}:
        assert name in parameters
        assert f"\n    {name}: " in described
        assert name == "groups" or f"  --{name.replace('_', '-')} [" in switches


@pytest.mark.parametrize("cls", [StepwiseOptimizer, gpuopt.AdamOptimizer])
def test_an_unknown_argument_is_answered_with_the_known_ones(cls: Any) -> None:
    known = ".*".join(inspect.signature(cls).parameters)
    with pytest.raises(TypeError, match=f"{cls.__name__} takes no lr.*; it takes {known}"):
        cls(lr=0.1)


@pytest.mark.parametrize("name", ["TorchAdamW", "TorchNAdam", "RAdam"])
@pytest.mark.parametrize(
    "bad", [{"beta1": 1.0}, {"beta2": 1.5}, {"beta1": -0.1}, {"epsilon": -1.0}], ids=str
)
def test_torchs_forms_refuse_the_numbers_that_torch_refuses(
    name: str, bad: dict[str, float]
) -> None:
    [(argument, value)] = bad.items()
    with pytest.raises(ValueError, match=rf"^{argument} must be at least 0.*, got {value}$"):
        getattr(gpuopt, f"{name}Optimizer")(**bad)


class DeclaringOptimizer(RuleOptimizer):
    """Descends."""

    rule = gpuopt.MomentumOptimizer.rule
    hyperparameter_of: ClassVar[dict[str, str]] = {"decay": "momentum"}

    def __init__(
        self,
        learning_rate: Annotated[Hyperparameter, AllDigits, "Step size."],
        momentum: Annotated[Hyperparameter, Range(0, 1), "What remains."] = 0.5,
        mode: Annotated[Literal["a", "b"], 'Say "a", or "b".'] = "a",
        other: Unknown | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(common, learning_rate=learning_rate, momentum=momentum)


def test_what_stands_beside_a_type_is_checked_and_shown_in_help() -> None:
    with pytest.raises(ValueError, match=r"^momentum must be at least 0 and at most 1, got 1\.5$"):
        DeclaringOptimizer(0.1, 1.5)
    with pytest.raises(ValueError, match=r'^group "b": momentum must be .*, got nan$'):
        DeclaringOptimizer(0.1, groups=[ParameterGroup("b", momentum=np.nan)])
    optimizer = DeclaringOptimizer(0.1, np.float32(1))
    with pytest.raises(ValueError, match="momentum must be at least 0"):
        optimizer.hyperparameters["momentum"] = -1
    w = Variable(np.zeros(1), name="w")
    optimizer.apply_gradients([(np.ones(1), w)])
    assert w.numpy()[0] == -0.1  # which float32 rounds
    args = inspect.getdoc(DeclaringOptimizer).partition("Descends.\n\nArgs:\n")[2]
    assert args.startswith(
        "    learning_rate: Step size.\n"
        "    momentum: What remains; at least 0 and at most 1.\n"
        '    mode: Say "a", or "b".\n'
        "    on_nonfinite, groups,"
    )
    for shown in (DeclaringOptimizer, DeclaringOptimizer.__init__):
        types = inspect.signature(shown).parameters
        assert types["momentum"].annotation == "Hyperparameter"
        assert types["mode"].annotation == "Literal['a', 'b']"


def test_a_subclass_has_the_ranges_of_the_constructor_that_it_extends() -> None:
    class Own(gpuopt.FtrlOptimizer):
        def __init__(self, rate: float, strength: float) -> None:
            super().__init__(rate, l1_regularization_strength=strength)

    Own(0.1, 0.5)
    with pytest.raises(ValueError, match="l1_regularization_strength must be at least 0, got -1"):
        Own(0.1, -1)


def test_a_subclass_may_describe_its_arguments_itself() -> None:
    class Own(gpuopt.AdamOptimizer):
        """Steps.

        Args:
            beta1: Mine.
        """

        def __init__(self, beta1: float, mine: float) -> None:
            super().__init__(beta1=beta1)

    class Brief(Own):
        """Steps."""

    assert inspect.getdoc(Own) == "Steps.\n\nArgs:\n    beta1: Mine."
    described = "Steps.\n\nArgs:\n    beta1: Decay of the gradient's average `m`."
    assert inspect.getdoc(Brief) == described


def test_what_python_cannot_evaluate_of_a_constructor_is_left_alone() -> None:
    class Own(gpuopt.FtrlOptimizer):
        """Follows."""

        def __init__(self, rate: Any) -> None:
            super().__init__(rate)

    Own.__init__.__annotations__["rate"] = 'float | "Unknown"'
    assert Own(0.5).hyperparameters["learning_rate"] == 0.5
    assert inspect.getdoc(Own) == "Follows."


def test_any_constructor_of_a_subclass_has_a_signature() -> None:
    class Untyped(gpuopt.AdamOptimizer):
        def __init__(self, extra, **rest):
            super().__init__(**rest)

    class TypedElsewhere(gpuopt.AdamOptimizer):
        def __init__(self, extra: Unknown) -> None:
            super().__init__()

    assert list(inspect.signature(Untyped).parameters) == ["extra", "rest"]
    assert list(inspect.signature(TypedElsewhere).parameters) == ["extra"]
    assert Untyped(1, name="mine").get_name() == "mine"


def test_a_text_of_several_types_shows_the_types_alone() -> None:
    """Of a module with `from __future__ import annotations`, as this one."""

    class Own(gpuopt.optimizers.base.RuleOptimizer):
        rule = gpuopt.GradientDescentOptimizer.rule

        def __init__(
            self,
            learning_rate: Annotated[float, "Rate."] | None = None,
            other: Annotated[int, np.ones(3), "What else."] = 1,
            **common: Any,
        ) -> None:
            super().__init__(common, learning_rate=learning_rate or 0.5)

    shown = str(inspect.signature(Own))
    assert "Annotated" not in shown
    assert "learning_rate: 'float | None' = None, other: 'int' = 1" in shown
    assert declared(Own)["other"].meaning == "What else."


def test_a_signature_follows_a_constructor_that_is_replaced() -> None:
    class Base(StepwiseOptimizer):
        pass

    class Child(Base):
        pass

    assert inspect.signature(Base).parameters["name"].default == "Base"
    assert inspect.signature(Child).parameters["name"].default == "Child"

    def replaced(self: Any, extra: Any) -> None:
        """Stands in for the constructor."""

    Base.__init__ = replaced  # type: ignore[method-assign]
    assert list(inspect.signature(Child).parameters) == ["extra"]
    assert inspect.signature(StepwiseOptimizer).parameters["name"].default == "Stepwise"


def test_a_class_whose_signature_was_read_can_be_collected() -> None:
    class Own(gpuopt.AdamOptimizer):
        def __init__(self) -> None:
            super().__init__()

    inspect.signature(Own)
    alive = weakref.ref(Own)
    del Own
    gc.collect()
    assert alive() is None


def test_slots_start_at_zero_unless_the_class_says_otherwise() -> None:
    w = Variable(np.ones(2, np.float32))
    for cls, expected in (
        (gpuopt.AdamOptimizer, {"m": 0.0, "v": 0.0}),
        (gpuopt.AdagradOptimizer, {"accumulator": np.float32(0.1)}),
        (gpuopt.RMSPropOptimizer, {"rms": 1.0, "momentum": 0.0}),
    ):
        optimizer = cls(0.1)
        optimizer._create_slots([w])
        found = {name: optimizer.get_slot(w, name).numpy()[0] for name in expected}
        assert found == expected


def test_a_constructor_that_annotates_nothing_is_answered_with_the_common_arguments_too() -> None:
    class Own(RuleOptimizer):
        rule = gpuopt.GradientDescentOptimizer.rule

        def __init__(self, learning_rate, **common):
            super().__init__(common, learning_rate=learning_rate)

    with pytest.raises(TypeError) as refused:
        Own(0.1, nmae="x")
    told, _, known = str(refused.value).partition("; it takes ")
    assert told == "Own takes no nmae"
    assert sorted(known.split(", ")) == [
        "averages",
        "clip_form",
        "clip_norm",
        "clip_value",
        "gradient_dtype",
        "groups",
        "learning_rate",
        "masters",
        "name",
        "on_nonfinite",
        "slot_bits",
        "slot_dtype",
        "slot_form",
        "stochastic_rounding",
        "use_locking",
    ]


def test_a_scalar_that_is_no_hyperparameter_is_refused_by_name() -> None:
    class Own(RuleOptimizer):
        rule = gpuopt.GradientDescentOptimizer.rule

        def __init__(self, rate: float, **common: Unpack[Common]) -> None:
            super().__init__(common, rate=rate)

    w = Variable(np.ones(2, np.float32), name="w")
    expected = (
        '"gradient_descent" takes the scalar "learning_rate", which is no hyperparameter of Own'
    )
    with pytest.raises(TypeError, match=expected):
        Own(0.1).apply_gradients([(np.ones(2, np.float32), w)])
    assert (w.numpy() == 1).all()


def test_a_rule_without_its_decorator_is_refused_where_the_class_is_defined() -> None:
    with pytest.raises(TypeError, match=r"rule of Own is a plain function.*@gpuopt\.update_rule"):

        class Own(RuleOptimizer):
            rule = gpuopt.GradientDescentOptimizer.rule.apply


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("learning_rate", 'read and set optimizer.hyperparameters["learning_rate"]'),
        ("lr", 'read and set optimizer.hyperparameters["learning_rate"]'),
        ("epsilon", 'read and set optimizer.hyperparameters["epsilon"]'),
        (
            "step",
            "minimize(loss), update(params, grads) or apply_gradients([(gradient, variable)]) "
            "makes a step",
        ),
        ("zero_grad", "gradients are not kept from step to step: there is nothing to clear"),
        ("weights", None),
    ],
)
def test_what_other_libraries_optimizers_have_is_answered_by_what_is_there(
    name: str, hint: str | None
) -> None:
    for optimizer in (
        gpuopt.AdamOptimizer(),
        gpuopt.LossScaleOptimizer(gpuopt.AdamOptimizer(), gpuopt.DynamicLossScale()),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(optimizer, name)
        missing = f"'{type(optimizer).__name__}' object has no attribute '{name}'"
        assert str(raised.value) == (missing if hint is None else f"{missing}; {hint}")
        assert not hasattr(optimizer, name)


@pytest.mark.parametrize("name", ["learning_rate", "lr", "beta1", "clip_norm"])
def test_a_hyperparameter_is_not_set_by_an_attribute_that_no_step_reads(name: str) -> None:
    optimizer: Any = gpuopt.AdamOptimizer(0.5, clip_norm=2.0)
    for each in (optimizer, gpuopt.GradientAccumulationOptimizer(optimizer, 2)):
        with pytest.raises(
            AttributeError, match=rf"do not read an attribute '{name}': set optimiz"
        ):
            setattr(each, name, 0.25)
        each.notes = "a user's own"
    assert optimizer.hyperparameters["learning_rate"] == 0.5


@pytest.mark.parametrize(
    "name", ["clip_norm", "clip_value", "on_nonfinite", "masters", "slot_bits", "slot_dtype"]
)
def test_an_argument_is_not_set_by_an_attribute_that_no_step_reads(name: str) -> None:
    optimizer: Any = gpuopt.AdamOptimizer(0.5)
    moving = gpuopt.MovingAverageOptimizer(optimizer, 0.9)
    for each in (optimizer, moving, gpuopt.GradientAccumulationOptimizer(optimizer, 2)):
        with pytest.raises(
            AttributeError, match=f"an attribute '{name}': give {name} where the optimizer is made"
        ):
            setattr(each, name, 1.0)
        assert not hasattr(each, name)


@pytest.mark.parametrize("name", ["catch_up", "averages", "groups"])
def test_an_option_of_steps_is_not_changed_by_its_attribute(name: str) -> None:
    """Rows that were behind would make steps twice that a change has made for them."""
    optimizer: Any = gpuopt.AdamOptimizer(0.5, catch_up=True)
    before = getattr(optimizer, name, None)
    for each in (optimizer, gpuopt.LossScaleOptimizer(optimizer, gpuopt.DynamicLossScale())):
        with pytest.raises(AttributeError, match=f"give {name} where the optimizer is made"):
            setattr(each, name, False)
    assert getattr(optimizer, name, None) is before
    # A wrapper's attribute of the same name is its own.
    moving = gpuopt.MovingAverageOptimizer(optimizer, 0.5)
    assert pickle.loads(pickle.dumps(moving)).averages is not None
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.catch_up is True


def test_caution_is_not_changed_by_an_attribute() -> None:
    optimizer: Any = gpuopt.TorchAdamWOptimizer(0.5, cautious=True)
    with pytest.raises(AttributeError, match="give cautious where the optimizer is made"):
        optimizer.cautious = False


def test_an_optimizer_of_a_users_own_has_the_attributes_that_it_likes() -> None:
    class Own(gpuopt.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Own")
            self.learning_rate = 0.5

        @property
        def beta1(self) -> float:
            return self.beta2

    optimizer: Any = Own()
    assert optimizer.learning_rate == 0.5
    with pytest.raises(AttributeError, match=r"^'Own' object has no attribute 'beta2'$"):
        _ = optimizer.beta1


def test_type_checkers_know_the_hyperparameters_of_every_optimizer() -> None:
    known = set(get_args(HyperparameterName))
    assert OfGroup.__annotations__.keys() == known
    for name, cls in optimizer_classes().items():
        every = {*hyperparameters_of(cls)}
        has = {*make(name).hyperparameters} - {*cls.derived_hyperparameters}
        assert has <= every <= known & {*inspect.signature(cls).parameters}
