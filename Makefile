.PHONY: test lint docs bench

test:  ## the tests; the long ones: python -m pytest -m slow
	python -m pytest -q

lint:  ## pip install ruff mypy
	ruff format --check .
	ruff check .
	mypy

docs:  ## figures, then the tutorial's quotations and outputs
	python docs/figures.py
	python docs/sync.py

bench:  ## one step beside TRL's (pip install "trl==1.16"), and the checker on cases
	python bench/step.py --shape a
	python bench/checker.py
