"""Update rules: their numpy form, and where the header of their CUDA form is."""
