"""The chain of a ledger: every entry holds the hash of the line before it."""

import hashlib
import json
import random
import zlib

import pytest

from pfl_sklearn.privacy import PrivacyLedger
from pfl_sklearn.privacy._ledger_file import parse
from tests.helpers.ledgers import numbers, spend


def lines_of(path):
    return path.read_text().splitlines()


def rewrite(path, lines):
    path.write_text("\n".join(lines) + "\n")


def renumbered(lines):
    """The same lines with the numbers that their places ask for."""
    entries = [{**json.loads(line), "entry": n} for n, line in enumerate(lines[1:], 1)]
    return [lines[0], *map(json.dumps, entries)]


def check_refused(ledger, line):
    """Every use of the ledger must name the line that does not fit."""
    match = rf"line {line} of the privacy ledger {ledger.path}.*line {line + 1}\b.*edited"
    for use in (spend, PrivacyLedger.total, lambda ledger: PrivacyLedger(ledger.path)):
        with pytest.raises(ValueError, match=match):
            use(ledger)


@pytest.fixture
def ledger(path):
    return spend(PrivacyLedger(path, budget=4.0), 5)


def test_entries_hold_the_hash_of_the_line_before(path, ledger):
    lines = lines_of(path)
    assert json.loads(lines[0])["version"] == 3
    hashes = [hashlib.sha256(line.encode()).hexdigest() for line in lines[:-1]]
    assert [entry["previous"] for entry in ledger.entries] == hashes
    assert len(PrivacyLedger(path).entries) == 5


@pytest.mark.parametrize("line", [2, 5])
def test_a_digit_that_changed(path, ledger, line):
    lines = lines_of(path)
    lines[line - 1] = lines[line - 1].replace('"mu_replace_one": 0.2', '"mu_replace_one": 0.1')
    rewrite(path, lines)
    check_refused(ledger, line)


def test_a_budget_that_was_raised(path, ledger):
    lines = lines_of(path)
    lines[0] = lines[0].replace('"budget": 4.0', '"budget": 9.0')
    rewrite(path, lines)
    check_refused(ledger, 1)


def test_the_settings_are_covered_from_the_first_entry_on(path):
    """Before it, an edit with its own checksum goes unnoticed, as the documentation says."""
    PrivacyLedger(path, budget=4.0)
    edited = path.read_text().replace('"budget": 4.0', '"budget": 9.0')
    path.write_text(edited)
    with pytest.raises(ValueError, match=r"line 1 of the privacy ledger .*not as it was written"):
        PrivacyLedger(path)
    text = edited[: edited.index(', "crc32"')] + "}"
    path.write_text(f'{text[:-1]}, "crc32": "{zlib.crc32(text.encode()):08x}"}}\n')
    ledger = spend(PrivacyLedger(path, budget=9.0))
    path.write_text(path.read_text().replace('"budget": 9.0', '"budget": 4.0'))
    check_refused(ledger, 1)


@pytest.mark.parametrize(
    ("order", "line"),
    [([1, 2, 4, 5], 3), ([1, 3, 2, 4, 5], 2), ([1, 2, 2, 3, 4, 5], 3)],
    ids=["lost", "moved", "added"],
)
def test_lines_in_another_order_whose_numbers_were_mended(path, ledger, order, line):
    lines = lines_of(path)
    rewrite(path, renumbered([lines[0], *(lines[entry] for entry in order)]))
    check_refused(ledger, line)


@pytest.mark.parametrize("value", [None, "", 3, "0" * 64])
def test_another_hash(path, ledger, value):
    lines = lines_of(path)
    lines[3] = json.dumps({**json.loads(lines[3]), "previous": value})
    rewrite(path, lines)
    check_refused(ledger, 3)


def test_a_forged_line_without_a_hash(path, ledger):
    lines = lines_of(path)
    forged = json.loads(lines[3])
    del forged["previous"]
    rewrite(path, [*lines[:3], json.dumps(forged), *lines[4:]])
    with pytest.raises(ValueError, match=r"line 4 of the privacy ledger .*not a valid entry"):
        PrivacyLedger(path)


@pytest.mark.parametrize("n_entries", [0, 1])
def test_no_bit_of_the_last_line_changes_unnoticed(path, n_entries):
    """Its newline neither: the line would count as half an entry."""
    spend(PrivacyLedger(path), n_entries)
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for at in range(8 * start, 8 * len(whole)):
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match="ledger"):
            parse(bytes(changed), "ledger")


def test_the_end_is_anchored_outside_alone(path, ledger):
    """What is lost or edited there leaves no trace in the file, as the documentation says."""
    n_entries, anchor = len(ledger.entries), ledger.entries[-1]["previous"]
    lines = lines_of(path)
    rewrite(path, lines[:-2])
    assert len(ledger.entries) == n_entries - 2
    spend(ledger, 2)
    assert len(ledger.entries) == n_entries
    assert ledger.entries[n_entries - 1]["previous"] != anchor


def test_no_other_byte_goes_unnoticed(path):
    spend(PrivacyLedger(path), 2)
    whole, draw = path.read_bytes(), random.Random(0)
    for at in range(whole[:-1].rindex(b"\n") + 1):  # of all lines but the last
        changed = bytearray(whole)
        changed[at] ^= draw.randrange(1, 256)
        with pytest.raises(ValueError, match="ledger"):
            parse(bytes(changed), "ledger")


def test_a_last_line_without_its_newline_is_hashed_as_it_is(path, ledger):
    path.write_bytes(path.read_bytes()[:-1])
    spend(ledger)
    assert numbers(PrivacyLedger(path)) == [1, 2, 3, 4, 5, 6]
