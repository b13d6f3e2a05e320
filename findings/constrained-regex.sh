#!/bin/sh
# xgrammar 0.2.8, llguidance 1.9.1, outlines-core 0.2.14, lm-format-enforcer 0.11.3: one regular expression allows
# different tokens in each.
#
# All four mask the logits so that the text matches a regular expression. With a vocabulary of single characters, one
# can see what they allow. `.` matches a newline in xgrammar alone. xgrammar drops a `^` in the middle, where the others
# refuse the expression. After "a" of `a|ab`, outlines-core only allows the end of the text, so "ab" is never written.
# And a letter that the vocabulary does not have ends in an empty mask, in the end of the text, or in an error.
#
# It matters with a character model: `.*` keeps a sample on one line, or does not. An empty mask makes every logit -inf,
# and the softmax NaN.
#
# Seen (Linux x86-64, Python 3.11), the tokens allowed, of newline, a, b, x, y and the end of the text:
#                   xgrammar       llguidance  outlines-core  lm-format-enforcer
#   .b at first     newline, too   no newline  no newline     no newline
#   x^y after x     y              error       error          error
#   a|ab after a    b, end         b, end      end            b, end
#   z at first      nothing        end         error          nothing
set -eu
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -qq "pip>=25.1"
venv/bin/pip install -qq torch==2.13.0 numpy==2.4.6 xgrammar==0.2.8 llguidance==1.9.1 outlines-core==0.2.14 \
    lm-format-enforcer==0.11.3 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END' 2> log || { tail -n 1 log; exit 1; }
import sys

import llguidance
import llguidance.numpy
import xgrammar
from lmformatenforcer import RegexParser, TokenEnforcer
from lmformatenforcer.tokenenforcer import TokenEnforcerTokenizerData
from outlines_core import Guide, Index, Vocabulary

characters = ["\n", "a", "b", "x", "y"]
STOP = len(characters)
tokens = characters + ["<end>"]


def from_bits(mask):
    return [i for i in range(STOP + 1) if int(mask[0, 0]) >> i & 1]


def with_xgrammar(regex, text):
    tokenizer = xgrammar.TokenizerInfo(tokens, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[STOP])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(tokenizer).compile_regex(regex))
    for c in text:
        matcher.accept_token(tokens.index(c))
    mask = xgrammar.allocate_token_bitmask(1, STOP + 1)
    matcher.fill_next_token_bitmask(mask)
    return from_bits(mask)


class Tokenizer:
    eos_token_id, bos_token_id, special_token_ids = STOP, None, [STOP]
    tokens = [c.encode() for c in tokens]

    def __call__(self, text):
        return [tokens.index(c) for c in text]


def with_llguidance(regex, text):
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokenizer()))
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(regex), log_level=0)
    for c in text:
        matcher.consume_token(tokens.index(c))
    if matcher.get_error():
        raise ValueError(matcher.get_error())
    mask = llguidance.numpy.allocate_token_bitmask(1, STOP + 1)
    llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
    return from_bits(mask)


def with_outlines(regex, text):
    guide = Guide(Index(regex, Vocabulary(STOP, {c: [i] for i, c in enumerate(characters)})))
    allowed = guide.get_tokens()
    for c in text:
        allowed = guide.advance(tokens.index(c))
    return sorted(allowed)


def with_lmfe(regex, text):
    letters = [(i, c, False) for i, c in enumerate(characters)]
    data = TokenEnforcerTokenizerData(letters, lambda ids: "".join(tokens[i] for i in ids), STOP, False, STOP + 1)
    enforcer = TokenEnforcer(data, RegexParser(regex))
    ids = [STOP]  # the prompt
    allowed = enforcer.get_allowed_tokens(ids)
    for c in text:
        ids = ids + [tokens.index(c)]
        allowed = enforcer.get_allowed_tokens(ids)
    return sorted(allowed.allowed_tokens)


engines = {"xgrammar": with_xgrammar, "llguidance": with_llguidance, "outlines": with_outlines, "lmfe": with_lmfe}
everything, line = "\\n a b x y", "a b x y"
expected = {
    (".b", ""): [everything, line, line, line],
    ("x^y", "x"): ["y", "error", "error", "error"],
    ("a|ab", "a"): ["b <end>", "b <end>", "<end>", "b <end>"],
    ("z", ""): ["", "<end>", "error", ""],
}
seen = {}
for regex, text in expected:
    seen[regex, text] = []
    for name, allowed in engines.items():
        try:
            result = " ".join(tokens[i].replace("\n", "\\n") for i in allowed(regex, text))
        except BaseException as error:  # lm-format-enforcer's parser raises one that is not an Exception
            result = "error"
            if isinstance(error, KeyboardInterrupt):
                raise
        seen[regex, text].append(result)
        print(f"{regex:6} after {text!r:4} {name:12} {result or 'nothing'}")
if changed := [regex for regex in expected if seen[regex] != expected[regex]]:
    sys.exit(f"changed: {changed}")
END
