"""Makes tests/golden/tf1_names.npz with real TensorFlow (2.21, in TensorFlow 1's manner).

    pip install tensorflow && python tests/golden/make_tf1_names.py

Each graph is trained for 3 steps with gradients of 1. Under "GRAPH/saved/" is what its checkpoint
holds then, by TensorFlow's names, and under "GRAPH/next/" its variables after one more step.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

ONE = np.ones(3, np.float32)


def variable(name: str) -> tf.Variable:
    return tf.get_variable(name, initializer=ONE)


def step(optimizer: tf.train.Optimizer, *variables: tf.Variable) -> tf.Operation:
    return optimizer.apply_gradients([(tf.ones(3), each) for each in variables])


def gan() -> list[tf.Operation]:
    d, g = variable("d/w"), variable("g/w")
    return [
        step(tf.train.AdamOptimizer(0.1, 0.5), d),
        step(tf.train.AdamOptimizer(0.1, 0.9), g),
    ]


def both_and_one() -> list[tf.Operation]:
    d, g = variable("d/w"), variable("g/w")
    first = step(tf.train.AdamOptimizer(0.1, 0.5), d, g)
    with tf.control_dependencies([first]):
        return [step(tf.train.AdamOptimizer(0.1, 0.9), g)]


def own_power() -> list[tf.Operation]:
    w = variable("w")
    tf.get_variable("beta1_power", initializer=7.0)
    return [step(tf.train.AdamOptimizer(0.1), w)]


def name_scope() -> list[tf.Operation]:
    w = variable("w")
    with tf.name_scope("optimizer"):
        return [step(tf.train.AdamOptimizer(0.1), w)]


def two_scopes() -> list[tf.Operation]:
    d, g = variable("d/w"), variable("g/w")
    made = []
    for scope, beta1, each in (("train_d", 0.5, d), ("train_g", 0.9, g)):
        with tf.variable_scope(scope):
            made.append(step(tf.train.AdamOptimizer(0.1, beta1), each))
    return made


def in_scope(optimizer: Callable[[], tf.train.Optimizer]) -> Callable[[], list[tf.Operation]]:
    def build() -> list[tf.Operation]:
        w = variable("w")
        with tf.variable_scope("train"):
            return [step(optimizer(), w)]

    return build


GRAPHS = {
    "gan": gan,
    "both_and_one": both_and_one,
    "own_power": own_power,
    "name_scope": name_scope,
    "two_scopes": two_scopes,
    "Momentum": in_scope(lambda: tf.train.MomentumOptimizer(0.1, 0.9)),
    "Adagrad": in_scope(lambda: tf.train.AdagradOptimizer(0.1)),
    "RMSProp": in_scope(lambda: tf.train.RMSPropOptimizer(0.1, momentum=0.5)),
    "Ftrl": in_scope(lambda: tf.train.FtrlOptimizer(0.1)),
    "Adadelta": in_scope(lambda: tf.train.AdadeltaOptimizer(0.1)),
    "Adam": in_scope(lambda: tf.train.AdamOptimizer(0.1)),
}


def main() -> None:
    tf.disable_eager_execution()
    arrays = {}
    for name, build in GRAPHS.items():
        with tf.Graph().as_default(), tf.Session() as session, tempfile.TemporaryDirectory() as at:
            updates = build()
            session.run(tf.global_variables_initializer())
            for _ in range(3):
                session.run(updates)
            path = tf.train.Saver().save(session, f"{at}/model.ckpt")
            reader = tf.train.load_checkpoint(path)
            for key in reader.get_variable_to_shape_map():
                arrays[f"{name}/saved/{key}"] = reader.get_tensor(key)
            session.run(updates)
            for each in tf.trainable_variables():
                arrays[f"{name}/next/{each.op.name}"] = session.run(each)
    np.savez_compressed(Path(__file__).parent / "tf1_names.npz", **arrays)


if __name__ == "__main__":
    main()
