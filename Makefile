.PHONY: demo test test-all setup
PYTHON ?= python3

demo:
	$(PYTHON) scripts/dev.py demo

test:
	$(PYTHON) scripts/dev.py test

test-all:
	$(PYTHON) scripts/dev.py test-all

setup:
	$(PYTHON) scripts/dev.py setup
