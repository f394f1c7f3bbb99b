import gc
import pytest

@pytest.fixture(autouse=True)
def names_of_earlier_tests_are_free():
    """A caught exception keeps its test's variables, and so their names, in a reference cycle."""
    gc.collect(1)
