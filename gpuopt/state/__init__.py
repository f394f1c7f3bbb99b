"""The state of an optimizer: slots, scalars, and values that wait to be restored."""
