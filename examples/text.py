"""What rnn.py and lstm.py learn to spell, as one-hot characters."""

import numpy as np

SENTENCES = ["the cat sat on the mat ", "the dog sat on the log ", "the hen sat on the pen "]
CHARACTERS = sorted(set("".join(SENTENCES)))


def one_hot_text() -> np.ndarray:
    """Returns [length, number of sentences, number of characters]."""
    numbers = [[CHARACTERS.index(each) for each in sentence] for sentence in SENTENCES]
    return np.eye(len(CHARACTERS))[np.transpose(numbers)]
