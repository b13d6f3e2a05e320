#!/bin/sh
# @huggingface/tokenizers 0.2.0 (JavaScript) reading a file of tokenizers 0.23.3: WordLevel has no unknown token.
#
# In Python, a word that is not in the vocabulary becomes the unknown token of the file. In JavaScript the same file
# gives the id null, and in transformers.js a null ends in "Cannot convert undefined to a BigInt".
#
# It matters for character models, which are WordLevel tokenizers: the text that Python answers stops a web page. Check
# the characters before you encode, or use a BPE tokenizer, whose unknown token works.
#
# Seen (Linux x86-64, Python 3.11, Node.js 20), "the cat sat" with a vocabulary of [UNK], the, cat:
#   tokenizers in Python    [1,2,0]
#   the same in JavaScript  [1,2,null]
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tokenizers==0.23.3
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/tokenizers@0.2.0
venv/bin/python - > python.txt <<'END'
import json

from tokenizers import Tokenizer, models, pre_tokenizers

tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer.add_special_tokens(["[UNK]"])
tokenizer.save("tokenizer.json")
print(json.dumps(tokenizer.encode("the cat sat").ids, separators=(",", ":")))
END
cat > read.mjs <<'END'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const tokenizer = new Tokenizer(JSON.parse(readFileSync("tokenizer.json")), {});
console.log(JSON.stringify(tokenizer.encode("the cat sat").ids));
END
node read.mjs > javascript.txt
echo "tokenizers in Python    $(cat python.txt)"
echo "the same in JavaScript  $(cat javascript.txt)"
if [ "$(cat python.txt) $(cat javascript.txt)" != "[1,2,0] [1,2,null]" ]; then
    echo "changed: an unknown word has the same id in Python and JavaScript" >&2
    exit 1
fi
