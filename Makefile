# make demo    environment, data, a short training run on the CPU, and a sample that is checked against no cache
# make test    environment, lint, the fast tests
# make check   make test, and the slow tests
# make web     out/web: a page that generates in the browser, from the model in out
PYTHON ?= python3
BIN = .venv/bin
DEMO = out/demo
SOURCES = model.py train.py $(wildcard kvgpt/*.py kvgpt/*/*.py)

.PHONY: demo test check web lint data
.DELETE_ON_ERROR:

.venv/installed: requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@echo "installing requirements.txt and the dev tools into .venv; torch is large, this can take minutes"
	$(BIN)/python -m pip install --quiet -r requirements.txt --group dev
	@touch $@

data: .venv/installed
	$(BIN)/python data/prepare.py

$(DEMO)/ckpt.pt: .venv/installed $(SOURCES) | data
	$(BIN)/python train.py --preset nanogpt-cpu --device cpu --max_iters 1000 --eval_interval 250 --out_dir $(DEMO)

demo: data $(DEMO)/ckpt.pt
	$(BIN)/python sample.py --out_dir $(DEMO) --device cpu --kv_cache --verify

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# a process per core, because torch gains little from a second thread in models this small
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow" -n auto --maxprocesses 8

check: test
	@$(MAKE) -s web/node_modules || echo "npm cannot fetch what the page needs: the page is not tested"
	$(BIN)/python -m pytest -q -m slow

web/node_modules: web/package-lock.json
	npm ci --prefix web --no-audit --no-fund
	@touch $@

web: .venv/installed web/node_modules
	$(BIN)/python export.py --format web
