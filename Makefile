# Thin: run.py does the work, also where make is missing. Arguments: make test ARGS="-k adam"
PYTHON ?= python3
TASKS = demo test test-full test-gpu test-gpu-full test-ranks test-peers test-thinc test-package test-kernels test-kernels-full mutants lint bench docs new-optimizer gallery

.PHONY: $(TASKS) clean
$(TASKS):
	@$(PYTHON) run.py $@ $(ARGS)

new-optimizer: ARGS = $(NAME)

clean:
	rm -rf .venv .venv-* dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
