# Everything runs in .venv, which the first target that needs it makes.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# pyright comes whole in its wheel; newer releases are not this tree's business.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: demo test slow soak lint bench clean

demo: $(INSTALLED)
	$(RUN) examples/digits.py

test: $(INSTALLED)
	$(RUN) -m pytest -q

slow: $(INSTALLED)
	$(RUN) -m pytest -q -m slow

soak: $(INSTALLED)
	$(RUN) -m pytest -q -m soak -o faulthandler_timeout=0

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pyright --pythonpath $(RUN)

bench: $(INSTALLED)
	$(RUN) benchmarks/startup.py $(BENCH)
	$(RUN) benchmarks/failure.py $(BENCH)
	$(RUN) benchmarks/values.py $(BENCH)
	$(RUN) benchmarks/collectives.py $(BENCH)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
