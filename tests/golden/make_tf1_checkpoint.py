"""Makes tests/golden/tf1_checkpoint with real TensorFlow (2.21, in TensorFlow 1's manner).

    pip install tensorflow && python tests/golden/make_tf1_checkpoint.py

`tf.train.Saver` writes a checkpoint after 3 steps; continued.npz holds the gradients of the next 4
steps, and every variable after them.
"""

from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

FOLDER = Path(__file__).parent / "tf1_checkpoint"


def main() -> None:
    tf.disable_eager_execution()
    rng = np.random.default_rng(6)
    FOLDER.mkdir(exist_ok=True)
    kernel = tf.get_variable(
        "net/kernel", initializer=rng.normal(size=(4, 3)).astype(np.float32), use_resource=True
    )
    table = tf.get_variable(
        "table", initializer=rng.normal(size=(6, 2)).astype(np.float32), use_resource=True
    )
    step = tf.train.get_or_create_global_step()
    kernel_gradient = tf.placeholder(tf.float32, (4, 3))
    row_gradient = tf.placeholder(tf.float32, (3, 2))
    rows = tf.placeholder(tf.int64, (3,))
    slices = tf.IndexedSlices(row_gradient, rows, tf.constant([6, 2], tf.int64))
    first = tf.train.AdamOptimizer(0.05)
    second = tf.train.MomentumOptimizer(0.1, 0.9)
    # Run one after the other: in one run, the order of two updates of a variable is anyone's.
    updates = [
        first.apply_gradients([(kernel_gradient, kernel), (slices, table)], global_step=step),
        second.apply_gradients([(0.1 * kernel_gradient, kernel)]),
    ]
    gradients = {
        "kernel": rng.normal(size=(7, 4, 3)).astype(np.float32),
        "values": rng.normal(size=(7, 3, 2)).astype(np.float32),
        "rows": rng.integers(0, 6, size=(7, 3)),
    }
    saver = tf.train.Saver(write_version=tf.train.SaverDef.V2)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())

        def run(t: int) -> None:
            feed = {
                kernel_gradient: gradients["kernel"][t],
                row_gradient: gradients["values"][t],
                rows: gradients["rows"][t],
            }
            for update in updates:
                session.run(update, feed)

        for t in range(3):
            run(t)
        saver.save(session, str(FOLDER / "model.ckpt"), global_step=step, write_meta_graph=False)
        for t in range(3, 7):
            run(t)
        final = {v.op.name: session.run(v) for v in tf.global_variables()}
    np.savez(
        FOLDER / "continued.npz",
        **{f"gradient/{name}": value[3:] for name, value in gradients.items()},
        **{f"final/{name}": value for name, value in final.items()},
    )
    (FOLDER / "checkpoint").unlink()  # it only repeats the path


if __name__ == "__main__":
    main()
