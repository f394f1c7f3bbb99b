"""What an optimizer remembers: slots, scalars, and values that wait to be restored."""
