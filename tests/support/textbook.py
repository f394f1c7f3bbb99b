"""The optimizers once more, from their papers, in float64. Imports nothing of gpuopt.

Each function takes a weight `w` (an array), its history, a list of (step, gradient) with steps
counted from 1, and hyperparameters under TensorFlow's names. It returns the weight and the slots
after the last step. A sparse step that does not name the weight is left out of its history; where
the optimizer does something all the same, the gradient of such a step is None.
"""

from collections.abc import Callable, Sequence

import numpy as np

History = Sequence[tuple[int, np.ndarray]]
State = dict[str, np.ndarray]


def gradient_descent(w, history: History, *, learning_rate) -> State:
    """Cauchy 1847."""
    for _, g in history:
        w = w - learning_rate * g
    return {"var": w}


def momentum(
    w, history: History, *, learning_rate, momentum, use_nesterov=False, weight_decay=0.0
) -> State:
    """Polyak 1964; Sutskever et al. 2013, section 2, in the form of Bengio et al. 2013, eq. 7.

    Weight decay: Loshchilov & Hutter 2019, algorithm 1, with w minus the decay in place of w.
    """
    velocity = np.zeros_like(w)
    for _, g in history:
        w = w - weight_decay * w
        velocity = momentum * velocity - learning_rate * g
        w = w + (momentum * velocity - learning_rate * g if use_nesterov else velocity)
    # TensorFlow's accumulator is the velocity without the learning rate.
    return {"var": w, "momentum": -velocity / learning_rate}


def adagrad(
    w, history: History, *, learning_rate, initial_accumulator_value=0.1, weight_decay=0.0
) -> State:
    """Duchi, Hazan & Singer 2011, figure 1, with a diagonal matrix."""
    squares = np.full_like(w, initial_accumulator_value)
    for _, g in history:
        w = w - weight_decay * w
        squares = squares + g**2
        w = w - learning_rate * squares**-0.5 * g
    return {"var": w, "accumulator": squares}


def adagrad_da(
    w,
    history: History,
    *,
    learning_rate,
    initial_gradient_squared_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
) -> State:
    """Duchi, Hazan & Singer 2011, eq. 19: primal-dual, L1; L2 in the denominator."""
    total = np.zeros_like(w)
    squares = np.full_like(w, initial_gradient_squared_accumulator_value)
    for step, g in history:
        total = total + g
        squares = squares + g**2
        mean_beyond = np.maximum(np.abs(total) / step - l1_regularization_strength, 0)
        scale = l2_regularization_strength * learning_rate + np.sqrt(squares) / step
        w = -np.sign(total) * learning_rate * mean_beyond / scale
    return {"var": w, "gradient_accumulator": total, "gradient_squared_accumulator": squares}


def adadelta(w, history: History, *, learning_rate=0.001, rho=0.95, epsilon=1e-8) -> State:
    """Zeiler 2012, algorithm 1."""
    mean_square_gradient = np.zeros_like(w)
    mean_square_update = np.zeros_like(w)
    for _, g in history:
        mean_square_gradient = rho * mean_square_gradient + (1 - rho) * g**2
        rms_gradient = np.sqrt(mean_square_gradient + epsilon)
        rms_update = np.sqrt(mean_square_update + epsilon)
        delta = -(rms_update / rms_gradient) * g
        mean_square_update = rho * mean_square_update + (1 - rho) * delta**2
        w = w + learning_rate * delta
    return {"var": w, "accum": mean_square_gradient, "accum_update": mean_square_update}


def rms_prop(
    w, history: History, *, learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10, centered=False
) -> State:
    """Graves 2013, eq. 38-41 (centered); Tieleman & Hinton 2012 is the case without the mean."""
    mean_square, mean, delta = np.ones_like(w), np.zeros_like(w), np.zeros_like(w)
    for _, g in history:
        mean_square = decay * mean_square + (1 - decay) * g**2
        mean = decay * mean + (1 - decay) * g
        variance = mean_square - mean**2 if centered else mean_square
        delta = momentum * delta - learning_rate * g / np.sqrt(variance + epsilon)
        w = w + delta
    state = {"var": w, "rms": mean_square, "momentum": -delta}
    return {**state, "mg": mean} if centered else state


def adam(
    w,
    history: History,
    *,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.0,
) -> State:
    """Kingma & Ba 2015, algorithm 1 with the last paragraph of section 2.

    Weight decay: Loshchilov & Hutter 2019, algorithm 2, where lambda is not multiplied by alpha.
    """
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, given in history:
        w = w if given is None else w - weight_decay * w
        g = 0.0 if given is None else given
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        step_size = learning_rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w - step_size * m / (np.sqrt(v) + epsilon)
    return {"var": w, "m": m, "v": v}


def ftrl(
    w,
    history: History,
    *,
    learning_rate,
    learning_rate_power=-0.5,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    l2_shrinkage_regularization_strength=0.0,
    beta=0.0,
) -> State:
    """McMahan et al. 2013, algorithm 1; their n_i, sigma_i, z_i; TensorFlow doubles lambda_2."""
    n, z = np.full_like(w, initial_accumulator_value), np.zeros_like(w)
    lambda1 = l1_regularization_strength
    lambda2 = 2 * l2_regularization_strength + beta / learning_rate
    for _, g in history:
        larger = (n + g**2) ** -learning_rate_power
        sigma = (larger - n**-learning_rate_power) / learning_rate
        z = z + g + 2 * l2_shrinkage_regularization_strength * w - sigma * w
        n = n + g**2
        rate = larger / learning_rate + lambda2
        active = np.abs(z) > lambda1
        w = np.zeros_like(w)
        w[active] = -(z - np.sign(z) * lambda1)[active] / rate[active]
    return {"var": w, "accum": n, "linear": z}


def proximal_gradient_descent(
    w,
    history: History,
    *,
    learning_rate,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
) -> State:
    """Duchi & Singer 2009, eq. 19 with eq. 21's shrinkage."""
    for _, g in history:
        half_step = w - learning_rate * g
        kept = np.maximum(np.abs(half_step) - learning_rate * l1_regularization_strength, 0)
        w = np.sign(half_step) * kept / (1 + learning_rate * l2_regularization_strength)
    return {"var": w}


def proximal_adagrad(
    w,
    history: History,
    *,
    learning_rate,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
) -> State:
    """Duchi, Hazan & Singer 2011, section 5.1: composite mirror descent."""
    squares = np.full_like(w, initial_accumulator_value)
    for _, g in history:
        squares = squares + g**2
        rate = learning_rate / np.sqrt(squares)
        half_step = w - rate * g
        kept = np.maximum(np.abs(half_step) - rate * l1_regularization_strength, 0)
        w = np.sign(half_step) * kept / (1 + rate * l2_regularization_strength)
    return {"var": w, "accumulator": squares}


def nadam(
    w, history: History, *, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
) -> State:
    """Dozat 2016, algorithm 2, with a constant mu, and bias correction and epsilon as in `adam`."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, given in history:
        g = 0.0 if given is None else given
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        ahead = beta1 * m + (1 - beta1) * g
        step_size = learning_rate * np.sqrt(1 - beta2**step) / (1 - beta1**step)
        w = w if given is None else w - step_size * ahead / (np.sqrt(v) + epsilon)
    return {"var": w, "m": m, "v": v}


def ada_max(
    w, history: History, *, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
) -> State:
    """Kingma & Ba 2015, algorithm 2; TensorFlow adds epsilon."""
    m, u = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        u = np.maximum(beta2 * u, np.abs(g))
        w = w - learning_rate / (1 - beta1**step) * m / (u + epsilon)
    return {"var": w, "m": m, "v": u}


def add_sign(
    w, history: History, *, learning_rate=0.1, alpha=1.0, beta=0.9, sign_decay_fn=None
) -> State:
    """Bello et al. 2017, section 4."""
    m = np.zeros_like(w)
    for step, given in history:
        g = np.zeros_like(w) if given is None else given
        m = beta * m + (1 - beta) * g
        decay = sign_decay_fn(step - 1) if sign_decay_fn else 1.0
        agreement = np.sign(g * m)
        w = w - learning_rate * (alpha + decay * agreement) * g
    return {"var": w, "m": m}


def power_sign(
    w, history: History, *, learning_rate=0.1, base=np.e, beta=0.9, sign_decay_fn=None
) -> State:
    """Bello et al. 2017, section 4."""
    m = np.zeros_like(w)
    for step, given in history:
        g = np.zeros_like(w) if given is None else given
        m = beta * m + (1 - beta) * g
        decay = sign_decay_fn(step - 1) if sign_decay_fn else 1.0
        w = w - learning_rate * base ** (decay * np.sign(g * m)) * g
    return {"var": w, "m": m}


def lars(
    w,
    history: History,
    *,
    learning_rate,
    momentum=0.9,
    weight_decay=0.0001,
    eeta=0.001,
    epsilon=0.0,
    skip_list=None,
    use_nesterov=False,
) -> State:
    """You, Gitman & Ginsburg 2017, algorithm 1; TensorFlow adds epsilon, and 1 for a zero norm.

    `w` is a whole variable, and a `skip_list` names it.
    """
    velocity = np.zeros_like(w)
    for _, g in history:
        rate = learning_rate
        if not skip_list:
            norms = np.linalg.norm(w), np.linalg.norm(g)
            if min(norms) > 0:
                rate = rate * eeta * norms[0] / (norms[1] + weight_decay * norms[0] + epsilon)
            g = g + weight_decay * w
        velocity = momentum * velocity + rate * g
        w = w - (momentum * velocity + rate * g if use_nesterov else velocity)
    return {"var": w, "momentum": velocity}


_momentum = momentum


def sparse_lars(w, history: History, *, learning_rate, momentum=0.9, use_nesterov=False) -> State:
    """TensorFlow: a step of Momentum on the rows that a gradient names."""
    return _momentum(
        w, history, learning_rate=learning_rate, momentum=momentum, use_nesterov=use_nesterov
    )


def torch_adam_w(
    w,
    history: History,
    *,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.01,
) -> State:
    """Loshchilov & Hutter 2019, algorithm 2, with alpha * lambda for lambda."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        w = (1 - learning_rate * weight_decay) * w - learning_rate * m_hat / (
            np.sqrt(v_hat) + epsilon
        )
    return {"var": w, "m": m, "v": v}


def ams_grad(
    w,
    history: History,
    *,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    form="torch",
) -> State:
    """Reddi, Kale & Kumar 2018, algorithm 2, whose v is corrected after or before its maximum."""
    m, v, largest = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        correction = 1 - beta2**step
        largest = np.maximum(largest, v / correction if form == "optax" else v)
        v_hat = largest if form == "optax" else largest / correction
        w = w - learning_rate * m / (1 - beta1**step) / (np.sqrt(v_hat) + epsilon)
    return {"var": w, "m": m, "v": v, "vhat": largest}


def torch_nadam(
    w,
    history: History,
    *,
    learning_rate=0.002,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    momentum_decay=0.004,
) -> State:
    """Dozat 2016, algorithm 2, with the schedule of its section 2.2.2."""
    m, v = np.zeros_like(w), np.zeros_like(w)

    def mu(step):
        return beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay))

    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        before, after = (np.prod([mu(k + 1) for k in range(n)]) for n in (step, step + 1))
        ahead = (1 - mu(step)) * g / (1 - before) + mu(step + 1) * m / (1 - after)
        w = w - learning_rate * ahead / (np.sqrt(v / (1 - beta2**step)) + epsilon)
    return {"var": w, "m": m, "v": v}


def r_adam(
    w, history: History, *, learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8
) -> State:
    """Liu et al. 2020, algorithm 2, with 5 for 4; torch adds epsilon to the root of v itself."""
    m, v = np.zeros_like(w), np.zeros_like(w)
    longest = 2 / (1 - beta2) - 1
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat = m / (1 - beta1**step)
        length = longest - 2 * step * beta2**step / (1 - beta2**step)
        if length > 5:
            r = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
            m_hat = m_hat * np.sqrt(r) * np.sqrt(1 - beta2**step) / (np.sqrt(v) + epsilon)
        w = w - learning_rate * m_hat
    return {"var": w, "m": m, "v": v}


def lion(
    w, history: History, *, learning_rate=0.0001, beta1=0.9, beta2=0.99, weight_decay=0.0
) -> State:
    """Chen et al. 2023, algorithm 2."""
    m = np.zeros_like(w)
    for _, g in history:
        c = beta1 * m + (1 - beta1) * g
        w = w - learning_rate * (np.sign(c) + weight_decay * w)
        m = beta2 * m + (1 - beta2) * g
    return {"var": w, "m": m}


def ada_belief(
    w,
    history: History,
    *,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-16,
    epsilon_root=1e-16,
) -> State:
    """Zhuang et al. 2020, algorithm 2, with an epsilon of its own in s."""
    m, s = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        s = beta2 * s + (1 - beta2) * (g - m) ** 2 + epsilon_root
        m_hat, s_hat = m / (1 - beta1**step), s / (1 - beta2**step)
        w = w - learning_rate * m_hat / (np.sqrt(s_hat) + epsilon)
    return {"var": w, "m": m, "s": s}


def torch_sgd(
    w,
    history: History,
    *,
    learning_rate=0.001,
    momentum=0.0,
    dampening=0.0,
    weight_decay=0.0,
    use_nesterov=False,
) -> State:
    """The box in the documentation of torch.optim.SGD."""
    b = np.zeros_like(w)
    for step, given in history:
        g = given + weight_decay * w
        if momentum:
            b = momentum * b + (1 - dampening) * g if step > 1 else g
            g = g + momentum * b if use_nesterov else b
        w = w - learning_rate * g
    return {"var": w, "momentum": b}


def torch_rms_prop(
    w,
    history: History,
    *,
    learning_rate=0.01,
    decay=0.99,
    epsilon=1e-8,
    momentum=0.0,
    centered=False,
) -> State:
    """The box in the documentation of torch.optim.RMSprop."""
    v, mean, b = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for _, g in history:
        v = decay * v + (1 - decay) * g**2
        mean = decay * mean + (1 - decay) * g
        step = g / (np.sqrt(v - mean**2 if centered else v) + epsilon)
        b = momentum * b + step
        w = w - learning_rate * b
    return {"var": w, "rms": v, "mg": mean, "momentum": b}


def torch_adagrad(
    w,
    history: History,
    *,
    learning_rate=0.01,
    learning_rate_decay=0.0,
    epsilon=1e-10,
    initial_accumulator_value=0.0,
) -> State:
    """The box in the documentation of torch.optim.Adagrad."""
    total = np.full_like(w, initial_accumulator_value)
    for step, g in history:
        total = total + g**2
        rate = learning_rate / (1 + (step - 1) * learning_rate_decay)
        w = w - rate * g / (np.sqrt(total) + epsilon)
    return {"var": w, "accumulator": total}


def schedule_free_adam_w(
    w,
    history: History,
    *,
    learning_rate=0.0025,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.0,
) -> State:
    """Defazio et al. 2024, algorithm 1, with a constant learning rate; the bias of v is corrected.

    `learning_rate` may be a function of the step, as in a warm-up: weights are squares of the
    largest so far.
    """

    def direction(step, g, v):
        v = beta2 * v + (1 - beta2) * g**2
        return g / (np.sqrt(v / (1 - beta2**step)) + epsilon), v

    return _schedule_free(w, history, direction, learning_rate, beta1, weight_decay)


def schedule_free_sgd(
    w, history: History, *, learning_rate=1.0, beta1=0.9, weight_decay=0.0
) -> State:
    """Defazio et al. 2024, equations 3 to 5, with the weights of its algorithm 1."""
    return _schedule_free(w, history, lambda _, g, v: (g, v), learning_rate, beta1, weight_decay)


def _schedule_free(w, history: History, direction, learning_rate, beta1, weight_decay) -> State:
    x, y, z, v = w, w, w, np.zeros_like(w)
    rate_at = learning_rate if callable(learning_rate) else lambda step: learning_rate
    rates: list[float] = []
    for step, g in history:
        rates.append(rate_at(step))
        u, v = direction(step, g, v)
        z = z - rates[-1] * (u + weight_decay * y)
        weights = [max(rates[: k + 1]) ** 2 for k in range(step)]
        c = weights[-1] / sum(weights)
        x = (1 - c) * x + c * z
        y = (1 - beta1) * z + beta1 * x
    return {"var": y, "z_minus_y": z - y, "v": v, "x": x}


def lamb(
    w,
    history: History,
    *,
    learning_rate=0.001,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-6,
    weight_decay=0.01,
    use_nvlamb=False,
) -> State:
    """You et al. 2020, algorithm 2, with phi(x) = x; Apex has 1 for the ratio without decay.

    `w` is a whole variable.
    """
    m, v = np.zeros_like(w), np.zeros_like(w)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        u = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * w
        norms = np.linalg.norm(w), np.linalg.norm(u)
        is_adapted = (weight_decay != 0 or use_nvlamb) and min(norms) > 0
        w = w - learning_rate * (norms[0] / norms[1] if is_adapted else 1) * u
    return {"var": w, "m": m, "v": v}


def row_wise_adagrad(
    w,
    history: History,
    *,
    learning_rate=0.01,
    initial_accumulator_value=0.0,
    epsilon=1e-8,
    weight_decay=0.0,
) -> State:
    """Adagrad with the mean over a row in place of the square; FBGEMM adds epsilon to the root.

    `w` is one row of a table.
    """
    total = np.full([1] * w.ndim, float(initial_accumulator_value))
    for _, g in history:
        total = total + np.mean(g**2)
        w = w * (1 - learning_rate * weight_decay) - learning_rate * g / (np.sqrt(total) + epsilon)
    return {"var": w, "accumulator": total}


def partial_row_wise_adam(
    w,
    history: History,
    *,
    learning_rate=0.01,
    beta1=0.9,
    beta2=0.999,
    epsilon=1e-8,
    weight_decay=0.0,
) -> State:
    """Kingma & Ba 2015, algorithm 1, with the mean over a row in place of the square.

    `w` is one row of a table. FBGEMM has the decay beside Adam's direction.
    """
    m, v = np.zeros_like(w), np.zeros([1] * w.ndim)
    for step, g in history:
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * np.mean(g**2)
        m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
        w = w - learning_rate * (m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * w)
    return {"var": w, "m": m, "v": v}


def cautious(
    base: Callable[..., State], w, history: History, *, weight_decay=0.0, **numbers
) -> State:
    """Liang et al. 2024, algorithm 1, with timm's mean, of at least 0.001.

    `w` is a whole variable, and `base` a function of this file whose steps depend on the gradients
    alone; `weight_decay` is times the learning rate.
    """
    before, state = np.zeros_like(w), {}
    for step, g in history:
        state = base(np.zeros_like(w), history[:step], **numbers)
        u, before = before - state["var"], state["var"]
        agrees = (u * g > 0).astype(float)
        w = (1 - numbers["learning_rate"] * weight_decay) * w
        w = w - u * agrees / max(agrees.mean(), 1e-3)
    return {**state, "var": w}


# A step that does not name a row is not in the row's history.
lazy_adam = adam
adam_w, momentum_w, adagrad_w, reg_adagrad = adam, momentum, adagrad, adagrad


def exponential_moving_average(start, values, *, decay) -> np.ndarray:
    """Weights of the geometric series, written out."""
    steps = len(values)
    weights = [(1 - decay) * decay ** (steps - 1 - k) for k in range(steps)]
    return decay**steps * start + sum(weight * v for weight, v in zip(weights, values, strict=True))
