"""Update rules: functions of numpy, and the functors in C++ that are traced from them."""
