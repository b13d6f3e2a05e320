"""The reports for maintainers: each has a script, and what it prints."""

import re


def shows(file, capsys):
    """Run the script of a report. Return whether it prints what the report says, give or take what rounding does."""
    text = file.read_text(encoding="utf-8")
    code, said = re.findall(r"^```(?:python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(code, {})
    shown, said, number = capsys.readouterr().out.strip(), said.strip(), r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
    pairs = zip(re.findall(number, shown), re.findall(number, said))
    close = all(abs(float(got) - float(wanted)) <= 0.5 * float(wanted) + 1e-12 for got, wanted in pairs)
    return close and re.sub(number, "", shown) == re.sub(number, "", said)
