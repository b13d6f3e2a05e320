"""The reports for maintainers: each is a section with a script, and what that prints."""

import re

import pytest


def reports(folder):
    """Return the script of each report, with what its file begins with, and what the report says that it prints."""
    found = []
    for file in sorted(folder.glob("*.md")):
        head, *sections = re.split("^## ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for section in sections:
            *code, said = re.findall(r"^```(?:python|text)\n(.*?)^```", head + section, re.MULTILINE | re.DOTALL)
            found.append(pytest.param("\n".join(code), said, id=f"{file.stem}: {section.splitlines()[0]}"))
    return found


def shows(code, said, capsys):
    """Return whether a script prints what its report says, give or take what rounding does."""
    exec(code, {})
    shown, said, number = capsys.readouterr().out.strip(), said.strip(), r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"
    pairs = zip(re.findall(number, shown), re.findall(number, said))
    close = all(abs(float(got) - float(wanted)) <= 0.5 * float(wanted) + 1e-12 for got, wanted in pairs)
    return close and re.sub(number, "", shown) == re.sub(number, "", said)
