#!/bin/sh
# @huggingface/tokenizers 0.2.0 (JavaScript) reading a file of tokenizers 0.23.3: Split knows one of its five behaviors.
#
# A pre-tokenizer Split says what becomes of the separator: removed, isolated, merged with the previous or the next
# piece, contiguous; and invert swaps separators and text. In JavaScript every behavior but "removed" is "isolated", and
# with invert what does not match is dropped, so the text loses characters.
#
# It matters because a tokenizer.json is meant to give the same tokens everywhere, and the model then reads different
# ones in the browser, without an error. Compare the ids in both before you publish a page.
#
# Seen (Linux x86-64, Python 3.11, Node.js 20), "to be, or" split at spaces; | stands between tokens:
#   removed                     Python to|be,|or        JavaScript to|be,|or
#   isolated                    Python to| |be,| |or    JavaScript to| |be,| |or
#   merged_with_previous        Python to |be, |or      JavaScript to| |be,| |or
#   merged_with_next            Python to| be,| or      JavaScript to| |be,| |or
#   isolated, invert            Python to| |be,| |or    JavaScript  | 
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq tokenizers==0.23.3
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/tokenizers@0.2.0
venv/bin/python - <<'END'
import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

pieces = ["[UNK]", " ", "to", "be,", "or", "to ", "be, ", " be,", " or"]
cases = []
for behavior, invert in (
    ("removed", False),
    ("isolated", False),
    ("merged_with_previous", False),
    ("merged_with_next", False),
    ("isolated", True),
):
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), behavior, invert=invert)
    name = behavior + ", invert" * invert
    cases.append({"name": name, "file": json.loads(tokenizer.to_str()), "python": tokenizer.encode("to be, or").tokens})
with open("cases.json", "w") as file:
    json.dump(cases, file)
END
cat > read.mjs <<'END'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const different = [];
for (const { name, file, python } of JSON.parse(readFileSync("cases.json"))) {
  const [a, b] = [python.join("|"), new Tokenizer(file, {}).encode("to be, or").tokens.join("|")];
  if (a !== b) different.push(name);
  console.log(`${name.padEnd(27)} Python ${a.padEnd(16)} JavaScript ${b}`);
}
if (different.join(" + ") !== "merged_with_previous + merged_with_next + isolated, invert") {
  console.error(`changed: which behaviors differ, now ${different.join(" + ") || "none"}`);
  process.exit(1);
}
END
node read.mjs
