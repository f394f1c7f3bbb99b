"""The demo: a wide-and-deep classifier of handwritten digits, trained by any of the optimizers."""
