# Every target sets up .venv by itself and works again when it is there.
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := outputs/tiny_face

.PHONY: demo test check chaos format clean

demo: $(READY)
	$(BIN)/accelerate launch train_reward_fl.py --config configs/tiny_face.yaml run.output_dir=$(RUN)
	$(BIN)/python tools/evaluate.py --run $(RUN) --data assets/tiny_world/eval/metadata.csv

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) test

# Both scripts, killed ten times each at random moments and resumed.
chaos: $(READY)
	CHAOS_KILLS=10 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load tests/test_chaos.py -k killed

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs build .pytest_cache .ruff_cache

$(READY): requirements.txt requirements-dev.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
