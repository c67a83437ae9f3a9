.PHONY: demo test setup
PYTHON ?= python3

demo:
	$(PYTHON) scripts/dev.py demo

test:
	$(PYTHON) scripts/dev.py test

setup:
	$(PYTHON) scripts/dev.py setup
