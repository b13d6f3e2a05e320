# make demo       environment, output with and without the cache, a short training run, and a sample
# make test       environment, lint, fast tests
# make check      make test, then the slow tests; says at its end what it skipped, and why
# make gpu        out/gpu/report.md: tests, speed and training on a CUDA device, with the PyTorch of your python3
# make web        out/web: a page that generates in the browser, from out/ckpt.pt or the pretrained model
# make elsewhere  what other libraries do: every script of docs/elsewhere, two hours, and what has changed
# make newest     tests of export and check_cache with the newest torch, transformers, onnxruntime and tokenizers
#
# The rest are parts of these, except make hub, the tests that make check leaves out because they install 1 GB: our
# exports in transformers.js, Optimum, OpenVINO, CTranslate2 and onnxruntime-genai.
PYTHON ?= python3
BIN = .venv/bin
DEMO = out/demo
RESULTS = out/tests
SOURCES = model.py train.py $(wildcard extras/*.py extras/*/*.py)
OTHERS = $(addprefix check_cache/tests/,wild frameworks versions/5.4 versions/5.23)
NEWEST = check_cache/tests extras/tests/formats extras/tests/test_check_cache_kit.py
PROMPT = --prompt "O Romeo, " --seed 1956 --device cpu
# one process per core, because models this small gain little from a second thread
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8
# slow tests run whole programs, so their limit is longer than the 300 seconds in pyproject.toml
LONG = --timeout 900

.PHONY: demo test check gpu web elsewhere newest compare data lint hub
.DELETE_ON_ERROR:

OLD = make: Python 3.11 or newer is needed, and $(PYTHON) is Python %d.%d: make PYTHON=python3.12, for example
define CHECK_PYTHON
@command -v $(PYTHON) > /dev/null || { echo "make: there is no $(PYTHON): install Python 3.11 or newer" >&2; exit 1; }
@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit("$(OLD)" % v if v < (3, 11) else 0)'
endef
# the reasons of skipped tests, and how many tests each of them has
define SAY_SKIPPED
@echo; echo "skipped:"; grep -ho 'type="pytest.skip" message="[^"]*"' $(RESULTS)/*.xml \
    | sed 's/^[^ ]* message="//; s/"$$//' | sort | uniq -c | sort -rn
endef

demo: compare $(DEMO)/ckpt.pt
	@echo; echo "3 of 4: a sample from the model you just trained"
	$(BIN)/python sample.py --out_dir $(DEMO) --device cpu --seed 1 --overflow slide --max_new_tokens 400
	@echo; echo "4 of 4: what to try next"
	@echo '  $(BIN)/python sample.py --prompt "O Romeo, " --explain             every shape on the way through the cache'
	@echo '  $(BIN)/python sample.py --out_dir $(DEMO) --seed 2               another sample from the new model'
	@echo '  $(BIN)/python train.py --eval_interval 500                       the default model: a few minutes, better text'

test: lint
	@rm -rf $(RESULTS)
	$(PYTEST) -m "not slow" --junitxml $(RESULTS)/fast.xml
	$(SAY_SKIPPED)

# test_hub.py is for make hub. Tests of one file share what takes long: an exported page, a trained model.
check: test
	@$(MAKE) -s extras/web/node_modules || echo "npm failed: skipping the tests of the web page"
	@$(MAKE) -s $(OTHERS:=/.packages) || echo "pip failed: test_wild.py, test_versions.py and test_frameworks.py skip"
	$(PYTEST) -m slow $(LONG) --dist loadfile --ignore extras/tests/test_hub.py --junitxml $(RESULTS)/slow.xml
	TEST_DEVICE=cpu $(PYTEST) $(LONG) extras/tests/test_gpu.py --junitxml $(RESULTS)/gpu.xml
	$(SAY_SKIPPED)
	@echo "  and extras/tests/test_hub.py: make hub installs what it needs"

# not .venv, because a machine with a GPU usually has its own PyTorch
gpu:
	$(CHECK_PYTHON)
	$(PYTHON) extras/tests/gpu_report.py

web: .venv/installed extras/web/node_modules
	$(BIN)/python -m extras.export --format web

elsewhere:
	$(CHECK_PYTHON)
	$(PYTHON) docs/elsewhere/run.py

# in an environment of its own, because the newest torch can take GBs
newest:
	$(CHECK_PYTHON)
	$(PYTHON) -m venv out/newest
	out/newest/bin/python -m pip install --quiet --upgrade pip
	out/newest/bin/python -m pip install --quiet -r requirements.txt --group dev
	out/newest/bin/python -m pip install --quiet --upgrade torch transformers onnxruntime tokenizers
	out/newest/bin/python -m pip list | grep -E "^(torch|transformers|onnxruntime|tokenizers) "
	OMP_NUM_THREADS=1 out/newest/bin/python -m pytest -q -n auto --maxprocesses 8 -m "not slow" $(LONG) $(NEWEST)

.venv/installed: requirements.txt tests/constraints.txt pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@echo "installing requirements.txt and the dev tools into .venv; torch is large, this can take minutes"
	$(BIN)/python -m pip install --quiet -r requirements.txt -c tests/constraints.txt --group dev
	@touch $@

compare: .venv/installed
	@echo; echo "1 of 4: the same prompt without and with the KV cache, with the pretrained model, assets/shakespeare.pt"
	$(BIN)/python sample.py $(PROMPT) --ckpt assets/shakespeare.pt --no-kv_cache
	@echo
	$(BIN)/python sample.py $(PROMPT) --ckpt assets/shakespeare.pt --kv_cache --verify
	@echo; echo "and with drafts and the C backend"
	$(BIN)/python sample.py $(PROMPT) --ckpt assets/shakespeare.pt --draft ngram --compile

data: .venv/installed
	$(BIN)/python data/prepare.py || test -f data/meta.json # your own text may be there

$(DEMO)/ckpt.pt: .venv/installed $(SOURCES) | data
	@echo; echo "2 of 4: a short training run. It ends after two evaluations without a better val loss, or at step 600."
	$(BIN)/python train.py --preset nanogpt-cpu --device cpu --max_iters 600 --eval_interval 100 --patience 2 \
	    --log_interval 100 --out_dir $(DEMO)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

hub: .venv/installed extras/tests/hub/node_modules extras/tests/hub/.packages extras/tests/hub/runtimes/.packages
	$(PYTEST) $(LONG) extras/tests/test_hub.py

# package.json pins what we use, and the date fixes what that depends on. Those of the hub are apart, because
# transformers.js takes 0.5 GB and the page does not need it.
extras/web/node_modules extras/tests/hub/node_modules: %/node_modules: %/package.json
	npm install --prefix $* --no-package-lock --before 2026-11-28 --ignore-scripts --no-audit --no-fund
	@touch $@

# outside .venv, because Optimum needs transformers 4, only test_hub.py needs other runtimes, only test_wild.py needs the decoders that check_cache found bugs
# in, only test_frameworks.py JAX and MLX, and test_versions.py older releases; torch and the like come from .venv
extras/tests/hub/.packages extras/tests/hub/runtimes/.packages $(OTHERS:=/.packages): %/.packages: %/requirements.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ -r $<
	@touch $@
