#!/bin/sh
# @huggingface/tokenizers 0.2.0 (JavaScript) reading a file of tokenizers 0.23.3: decoding eats a leading space.
#
# A Metaspace decoder with prepend_scheme "never" has nothing to remove, so Python gives back " or not" for the tokens
# of " or not". JavaScript removes the space whatever prepend_scheme says.
#
# It matters when you stream: a page that decodes one new token at a time loses the space in front of every word, or
# half of an indentation. Decode all tokens so far and print what is new.
#
# Seen (Linux x86-64, Python 3.11, Node.js 20), the tokens of " or not", decoded:
#   tokenizers in Python    " or not"
#   the same in JavaScript  "or not"
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tokenizers==0.23.3
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/tokenizers@0.2.0
venv/bin/python - > python.txt <<'END'
import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

tokenizer = Tokenizer(models.BPE(vocab={"▁or": 0, "▁not": 1, "▁": 2, "o": 3, "r": 4, "n": 5, "t": 6}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
tokenizer.save("tokenizer.json")
print(json.dumps(tokenizer.decode([0, 1])))
END
cat > read.mjs <<'END'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

console.log(JSON.stringify(new Tokenizer(JSON.parse(readFileSync("tokenizer.json")), {}).decode([0, 1])));
END
node read.mjs > javascript.txt
echo "tokenizers in Python    $(cat python.txt)"
echo "the same in JavaScript  $(cat javascript.txt)"
if [ "$(cat python.txt) $(cat javascript.txt)" != '" or not" "or not"' ]; then
    echo "changed: the leading space is the same in Python and JavaScript" >&2
    exit 1
fi
