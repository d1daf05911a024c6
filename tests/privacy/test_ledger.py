"""The privacy ledger: totals, budgets, settings, and damaged files."""

import math
import os
import pickle
from datetime import datetime

import pytest
from hypothesis import given, settings, strategies as st
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from pfl_sklearn import GaussianMean, PoissonMean, PrivacyWarning
from pfl_sklearn.compose import ClientColumn
from pfl_sklearn.priors import GammaPrior
from pfl_sklearn.privacy import (
    BudgetExceeded,
    GaussianEvent,
    PrivacyLedger,
    PureEvent,
    SampledGaussian,
    _ledger,
    _ledger_file,
    gdp_epsilon,
    gdp_mu,
)
from tests.helpers.ledgers import DELTA, GAUSSIAN, in_child, numbers, spend

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


# Totals.


@given(mus=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=6), delta=st.floats(1e-9, 0.1))
@settings(max_examples=25, deadline=None)
def test_gaussian_entries_compose_exactly(tmp_path_factory, mus, delta):
    ledger = PrivacyLedger(tmp_path_factory.mktemp("ledgers") / "x.jsonl", delta=delta)
    for mu in mus:
        spend(ledger, events=[GaussianEvent(None, mu)])
    expected = gdp_epsilon(math.sqrt(sum(mu**2 for mu in mus)), delta)
    assert ledger.total() == pytest.approx(expected, rel=1e-9)


def test_pure_entries_add_up(path):
    ledger = PrivacyLedger(path, delta=1e-9)
    assert ledger.total() == 0.0
    spend(ledger, events=[PureEvent(epsilon, 0.0, "replace_one") for epsilon in (0.5, 0.25)])
    assert spend(ledger, events=[PureEvent(1.0, 0.0, "replace_one")]).total() == pytest.approx(1.75)


def test_what_remains(path):
    ledger = PrivacyLedger(path, budget=(1.0, 1e-9))
    mean = GaussianMean(unit="row", publish="clients", bounds=(0.0, 1.0))
    assert ledger.remaining() == 1.0
    assert not ledger.can_spend(mean.set_params(epsilon=0.5))  # rows, where it protects clients
    counts = PoissonMean(epsilon=0.6, cap=5)
    pipeline = ClientColumn(make_pipeline(FunctionTransformer(), counts), column="who")
    assert ledger.can_spend(counts)
    assert ledger.can_spend(pipeline)
    assert not ledger.can_spend(PoissonMean(epsilon=1.1, cap=5))
    assert not ledger.can_spend(PoissonMean())
    assert not ledger.can_spend(GridSearchCV(counts, {"cap": [4, 5]}, cv=2))
    spend(ledger, events=[PureEvent(0.6, 0.0, "replace_one")])
    assert ledger.remaining() == pytest.approx(0.4)
    assert not ledger.can_spend(pipeline)
    assert ledger.can_spend(PoissonMean(epsilon=0.4, cap=5))
    assert len(ledger.entries) == 1
    spend(ledger, events=[PureEvent(0.4, 0.0, "replace_one")])
    assert ledger.remaining() == pytest.approx(0.0, abs=1e-7)
    assert ledger.can_spend(PoissonMean(GammaPrior(1.0, 1.0), epsilon=1.0))  # releases nothing


def test_without_a_budget_all_of_the_unit_can_be_spent(path):
    ledger = PrivacyLedger(path, delta=1e-9)
    seeded = PoissonMean(epsilon=0.6, cap=5, random_state=0)
    assert ledger.remaining() == math.inf
    assert ledger.can_spend(PoissonMean())
    assert ledger.can_spend(seeded)


def test_the_noise_of_an_earlier_fit_cannot_be_spent_again(path):
    ledger = PrivacyLedger(path, budget=(9.0, 1e-9))
    seeded = PoissonMean(epsilon=0.6, cap=5, random_state=0, ledger=ledger)
    assert ledger.can_spend(seeded)
    with pytest.warns(PrivacyWarning):
        seeded.fit_counts([1, 2, 3, 4, 5])
    assert not ledger.can_spend(seeded)
    assert ledger.can_spend(seeded.set_params(random_state=1))


def test_a_fit_that_releases_nothing_is_an_entry_without_cost(path):
    ledger = PrivacyLedger(path, budget=(0.1, DELTA))
    spend(ledger, 3, events=())
    assert numbers(ledger) == [1, 2, 3]
    assert ledger.total() == 0.0


def test_total_is_that_of_the_relation(path, tmp_path):
    other = PrivacyLedger(tmp_path / "other.jsonl", relation="add_remove")
    ledger = PrivacyLedger(path)
    assert spend(ledger).total() == pytest.approx(gdp_epsilon(0.2, DELTA))
    assert spend(other).total() == pytest.approx(gdp_epsilon(0.1, DELTA))


def test_an_infinite_total_names_the_entry(path):
    ledger = spend(PrivacyLedger(path, relation="add_remove"), 2)
    spend(ledger, events=[GaussianEvent(None, 1.0)])
    with pytest.warns(PrivacyWarning, match=r"entry 3 \(Somebody\).*relation='replace_one'"):
        assert ledger.total() == math.inf
    assert "entry 3" in str(ledger)
    assert ledger.to_frame()["epsilon"].tolist()[1:] == [gdp_epsilon(0.1, DELTA), math.inf]


def test_deltas_of_the_entries_count(path):
    ledger = PrivacyLedger(path)
    spend(ledger, 2, events=[PureEvent(1.0, 0.6 * DELTA, "replace_one")])
    with pytest.warns(PrivacyWarning, match=r"deltas.*\b1\.2e-05\b.*exceeds.*\b1e-05\b"):
        assert ledger.total() == math.inf


def test_entries_and_table(path):
    ledger = spend(PrivacyLedger(path, budget=(4.0, DELTA)), 12)
    entry = ledger.entries[-1]
    assert (entry["entry"], entry["what"], entry["unit"]) == (12, "Somebody", "client")
    assert entry["process"] == os.getpid()
    table = ledger.to_frame()
    assert table.index.tolist() == list(range(1, 13))
    assert table["time"].is_monotonic_increasing
    assert table["events"].unique().tolist() == [GAUSSIAN.to_dict()["kind"]]
    assert table["epsilon"].iloc[0] == pytest.approx(gdp_epsilon(0.2, DELTA))
    assert repr(ledger) == f"PrivacyLedger({str(path)!r}, budget=(4.0, 1e-05))"
    assert "of a budget of 4, at delta = 1e-05 (replace_one, unit: one client)" in str(ledger)
    assert "the last 10" in str(ledger)
    assert len(PrivacyLedger(path.with_name("new")).to_frame()) == 0


# The budget.


def test_a_budget_is_kept_to_the_last_bit(path):
    ledger = PrivacyLedger(path, budget=(2.0, DELTA))
    part = GaussianEvent(None, gdp_mu(2.0, DELTA) / 2)
    spend(ledger, 4, [part])
    assert ledger.total() == pytest.approx(2.0, rel=1e-9)
    before = path.read_bytes()
    message = (
        r"Somebody.*epsilon = 0\.1\d*\b.*\b2\b.*\b2\.0\d+\b.*"
        rf"\b2 \(at delta = 1e-05, replace_one\).*{path}"
    )
    with pytest.raises(BudgetExceeded, match=message):
        spend(ledger, events=[GaussianEvent(None, 0.05)])
    assert path.read_bytes() == before
    spend(ledger, events=())


def test_what_has_no_finite_epsilon_is_refused_by_a_budget(path):
    ledger = PrivacyLedger(path, budget=1e6, relation="add_remove")
    with pytest.raises(BudgetExceeded, match=r"Somebody.*epsilon = inf\b.*\b1e\+06\b"):
        spend(ledger, events=[PureEvent(math.inf, 0.0, "add_remove")])
    with pytest.raises(BudgetExceeded, match=r"Somebody.*epsilon = inf\b.*relation='replace_one'"):
        spend(ledger, events=[PureEvent(1.0, 0.0, "replace_one")])
    assert ledger.entries == []


@pytest.mark.parametrize(
    ("share", "events", "reason"),
    [
        (0.6, [PureEvent(1.0, 0.6 * DELTA, "replace_one")], r"1\.2e-05, which exceeds"),
        (0.4, [PureEvent(0.1, 0.3 * DELTA, "replace_one")] * 3, r"1\.3e-05, which exceeds"),
        (1.0, [GAUSSIAN], "1e-05, which uses up"),
    ],
)
def test_a_refusal_says_that_the_deltas_add_up(path, share, events, reason):
    ledger = PrivacyLedger(path, budget=(100.0, DELTA))
    spend(ledger, events=[PureEvent(1.0, share * DELTA, "replace_one")])
    message = (
        r"with the 1 spent so far the total would be inf \(.*"
        rf"deltas of the entries add up to {reason} delta = 1e-05"
    )
    with pytest.raises(BudgetExceeded, match=message):
        spend(ledger, events=events)
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, events=[PureEvent(math.inf, 0.0, "replace_one")])
    assert "add up" not in str(caught.value)


def test_a_refusal_under_add_remove_mentions_zero_out(path):
    ledger = PrivacyLedger(path, budget=(1.0, DELTA), relation="add_remove")
    plain, zero = GaussianEvent(0.1, None), GaussianEvent(None, None, mu_zero_out=0.1)
    spend(ledger, events=[plain])
    with pytest.raises(BudgetExceeded) as caught:
        spend(ledger, events=[plain] * 99)
    assert "zero_out" not in str(caught.value)
    under = r"delta = 1e-05, add_remove; .*zero_out\)"
    with pytest.raises(BudgetExceeded, match=under):
        spend(ledger, events=[zero] * 99)
    spend(ledger, events=[zero])
    with pytest.raises(BudgetExceeded, match=under):
        spend(ledger, events=[plain] * 99)


def test_a_refusal_names_the_relation_that_would_allow_it(path):
    other = "zero_out.*{}.*relation='zero_out'"
    ledger = PrivacyLedger(path, budget=(2.0, DELTA))
    alone = f"{gdp_epsilon(gdp_mu(2.0, DELTA) * 0.9, DELTA):.6g}"
    with pytest.raises(BudgetExceeded, match=other.format(alone)):
        spend(ledger, events=[GaussianEvent(gdp_mu(2.0, DELTA) * 0.9, None)])
    with pytest.raises(BudgetExceeded, match=r"Somebody.*budget of 2\b") as caught:
        spend(ledger, events=[GaussianEvent(gdp_mu(2.0, DELTA) * 1.1, None)])
    assert "zero_out" not in str(caught.value)


def test_another_unit_is_refused(path):
    ledger = PrivacyLedger(path)
    with pytest.raises(ValueError, match=r"Somebody.*\brow\b.*\bclient\b.*unit='row'"):
        ledger.spend([GAUSSIAN], what="Somebody", unit="row")
    rows = PrivacyLedger(path.with_name("rows"), unit="row")
    rows.spend([GAUSSIAN], what="Somebody", unit="row")
    with pytest.raises(ValueError, match=r"Somebody.*\bevent\b.*\brow\b.*unit='event'"):
        rows.spend([GAUSSIAN], what="Somebody", unit="event")


def test_a_replaced_row_is_a_replaced_client(path):
    rows = PrivacyLedger(path, budget=1.0, unit="row")
    counts = PoissonMean(epsilon=0.6, cap=5)
    assert rows.can_spend(counts)
    rows.spend([PureEvent(0.6, 0.0, "replace_one")], what="Somebody", unit="client")
    assert rows.entries[0]["unit"] == "client"
    assert not rows.can_spend(counts)
    assert "client" in str(rows).splitlines()[-1]
    # A client's contribution replaced by nothing says nothing of one replaced row.
    zeroed = PrivacyLedger(path.with_name("zeroed"), unit="row", relation="zero_out")
    assert not zeroed.can_spend(counts)
    with pytest.raises(ValueError, match="Somebody has unit='client'"):
        spend(zeroed)


class Clock:
    """Times that entries get, as datetime.now gives them."""

    def __init__(self, monkeypatch):
        self.time = "2026-11-29T12:00:00+00:00"
        monkeypatch.setattr(_ledger, "datetime", self)

    def now(self, zone):
        return datetime.fromisoformat(self.time).astimezone(zone)

    fromisoformat = staticmethod(datetime.fromisoformat)


@pytest.mark.parametrize(
    ("period", "name", "same", "next_one"),
    [
        ("year", "2026", "2026-12-31T23:59:59+00:00", "2027-01-01T00:30:00+00:00"),
        ("quarter", "2026 Q4", "2026-10-01T00:00:00+00:00", "2026-12-31T23:30:00-01:00"),
        ("month", "2026-11", "2026-11-01T00:00:00+00:00", "2026-12-01T00:00:00+00:00"),
    ],
)
def test_budgets_of_periods(path, monkeypatch, period, name, same, next_one):
    clock = Clock(monkeypatch)
    ledger = PrivacyLedger(path, budget=1.0, period=period)
    assert repr(ledger).endswith(f"budget=(1.0, 1e-05), period={period!r})")
    half = [PureEvent(0.5, 0.0, "replace_one")]
    spend(ledger, events=half)
    clock.time = same
    spend(ledger, events=half)
    assert ledger.remaining() == pytest.approx(0.0, abs=1e-4)
    assert f"1 in {name} of a budget of 1 a {period}" in str(ledger)
    with pytest.raises(BudgetExceeded, match=rf"spent so far in {name} the total"):
        spend(ledger, events=half)
    assert not ledger.can_spend(PoissonMean(epsilon=0.5, cap=5))
    clock.time = next_one
    assert ledger.remaining() == pytest.approx(1.0)
    spend(PrivacyLedger(path), events=half)
    assert ledger.total() == pytest.approx(1.5, abs=1e-3)  # what clients lose is never renewed


def test_owner_and_purpose(path):
    mine = spend(PrivacyLedger(path, owner="Ana", purpose="yearbook"))
    spend(PrivacyLedger(path, owner="Bo"))
    spend(PrivacyLedger(path))
    table = mine.to_frame()
    assert table["owner"].fillna("").tolist() == ["Ana", "Bo", ""]
    assert table["purpose"].fillna("").tolist() == ["yearbook", "", ""]
    assert "yearbook" in str(mine)
    assert pickle.loads(pickle.dumps(mine)).purpose == "yearbook"
    printed = str(spend(PrivacyLedger(path.with_name("nobody")))).splitlines()
    assert "purpose" not in " ".join(printed[1:])


def test_exceptions_travel_between_processes():
    assert str(pickle.loads(pickle.dumps(BudgetExceeded("too much")))) == "too much"


@pytest.mark.parametrize(
    ("event", "epsilon", "earned"),
    [
        (SampledGaussian(2.0, 5), gdp_epsilon(math.sqrt(5) / 2, DELTA), False),
        (GaussianEvent(None, 0.2, mu_zero_out=0.1), gdp_epsilon(0.1, DELTA), False),
        (GaussianEvent(0.1, 0.2), gdp_epsilon(0.1, DELTA), True),
    ],
)
def test_entries_that_protect_contributions_count_under_zero_out(path, event, epsilon, earned):
    """Under add/remove, where the number of clients is public."""
    ledger = PrivacyLedger(path, relation="add_remove")
    spend(spend(ledger, events=()), events=[event])
    caveat = "not that it takes part: 2."
    assert (caveat in str(ledger)) == (not earned)
    if earned:
        assert ledger.total() == pytest.approx(epsilon)
    else:
        with pytest.warns(PrivacyWarning, match=caveat):
            assert ledger.total() == pytest.approx(epsilon)


def test_an_infinite_ledger_still_names_what_protects_contributions(path):
    """Its table holds figures under zero-out, whatever the total is."""
    ledger = spend(PrivacyLedger(path, relation="add_remove"), events=[SampledGaussian(2.0, 5)])
    spend(ledger, events=[GaussianEvent(None, 1.0)])
    assert "infinite because of entry 2" in str(ledger)
    assert "not that it takes part: 1." in str(ledger)


# Settings.


def test_settings_stay_with_the_file(path):
    first = PrivacyLedger(path, budget=4, delta=1e-6, relation="add_remove", unit="row")
    again = PrivacyLedger(path)
    assert (again.budget, again.delta) == ((4.0, 1e-6), 1e-6)
    assert (again.relation, again.unit) == ("add_remove", "row")
    assert again == first == PrivacyLedger(path, budget=(4.0, 1e-6))
    plain = PrivacyLedger(path.with_name("plain"))
    assert (plain.budget, plain.delta, plain.relation) == (None, DELTA, "replace_one")
    assert plain.unit == "client"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 5.0}, r"budget=4\.0.*budget=5\.0"),
        ({"budget": (4.0, 1e-6)}, r"delta=1e-05.*delta=1e-06"),
        ({"delta": 0.1}, r"delta=1e-05.*delta=0\.1"),
        ({"relation": "add_remove"}, r"relation='replace_one'.*relation='add_remove'"),
        ({"unit": "row"}, r"unit='client'.*unit='row'"),
        ({"period": "year"}, r"period=None.*period='year'"),
    ],
)
def test_other_settings_are_refused(path, settings, message):
    PrivacyLedger(path, budget=4.0)
    with pytest.raises(ValueError, match=message):
        PrivacyLedger(path, **settings)
    PrivacyLedger(path.with_name("without"))
    with pytest.raises(ValueError, match=r"budget=None.*budget=1\.0"):
        PrivacyLedger(path.with_name("without"), budget=1.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"budget": 0.0}, r"budget.*None.*\(epsilon, delta\).*\b0\.0\b"),
        ({"budget": math.inf}, r"budget.*None.*\(epsilon, delta\).*\binf\b"),
        ({"budget": math.nan}, r"budget.*None.*\(epsilon, delta\).*\bnan\b"),
        ({"budget": True}, r"budget.*None.*\(epsilon, delta\).*\bTrue\b"),
        ({"budget": "4"}, r"budget.*None.*\(epsilon, delta\).*'4'"),
        ({"budget": (4.0, 1e-5, 3)}, r"budget.*None.*\(epsilon, delta\).*\(4\.0, 1e-05, 3\)"),
        ({"budget": (4.0, 1.0)}, r"delta.*\(0, 1\).*\b1\.0\b"),
        ({"budget": (4.0, 1e-5), "delta": 1e-6}, r"delta.*budget=\(4\.0, 1e-05\).*1e-06"),
        ({"delta": 0.0}, r"delta.*\(0, 1\).*\b0\.0\b"),
        ({"relation": "swap"}, r"relation.*replace_one, zero_out, add_remove.*None.*'swap'"),
        ({"unit": "user"}, r"unit.*client, row.*None.*'user'"),
        ({"period": "week"}, r"period.*year, quarter, month.*None.*'week'"),
        ({"owner": 3}, r"owner.*str or None.*3"),
        ({"period": "year"}, r"period='year' has no effect without a budget"),
    ],
)
def test_bad_settings(path, params, message):
    with pytest.raises(ValueError, match=message):
        PrivacyLedger(path, **params)
    assert not path.exists()


# Missing, replaced and damaged files.


def test_a_missing_folder(path):
    with pytest.raises(FileNotFoundError, match=r"PrivacyLedger.*nowhere.*No such file"):
        PrivacyLedger(path.with_name("nowhere") / "ledger.jsonl")


def test_a_folder_and_a_device_are_no_files(tmp_path):
    for place in (tmp_path, "/dev/null"):
        with pytest.raises(OSError, match=f"PrivacyLedger.*{place}.*regular file"):
            PrivacyLedger(place)


def test_a_pipe_is_an_error_and_does_not_hang(path):
    os.mkfifo(path)
    message = in_child(PrivacyLedger, path)
    assert message.startswith("OSError")
    assert f"{path} (not a regular file)" in message
    ledger = PrivacyLedger(path.with_name("real"))
    path.rename(ledger.path)
    message = in_child(spend, ledger)
    assert "cannot be used (not a regular file); nothing was spent" in message


def test_a_path_that_may_not_be_written(path):
    path.parent.chmod(0o500)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)
        PrivacyLedger(path)

    message = in_child(work)
    path.parent.chmod(0o700)
    assert message.startswith(f"PermissionError: PrivacyLedger cannot open {path} (Permission")


def test_a_file_that_may_only_be_read(path, monkeypatch):
    ledger = spend(PrivacyLedger(path))
    opened = os.open

    def read_only(name, flags, *mode):
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return opened(name, flags, *mode)

    monkeypatch.setattr(_ledger_file.os, "open", read_only)
    assert PrivacyLedger(path).total() == ledger.total()
    with pytest.raises(PermissionError, match=r"ledger\.jsonl.*Permission denied"):
        spend(ledger)


def test_a_file_that_is_gone(path):
    ledger = spend(PrivacyLedger(path))
    path.unlink()
    for use in (spend, PrivacyLedger.total, PrivacyLedger.to_frame):
        with pytest.raises(FileNotFoundError, match=r"ledger\.jsonl.*PrivacyLedger\(path\)"):
            use(ledger)
    assert not path.exists()


def test_a_file_that_was_replaced(path):
    ledger = spend(PrivacyLedger(path))
    path.unlink()
    PrivacyLedger(path)
    with pytest.raises(ValueError, match=r"ledger\.jsonl.*replaced"):
        spend(ledger)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"ledger\.jsonl.*replaced"):
        spend(ledger)


def test_a_file_that_is_replaced_while_it_is_used(path, monkeypatch):
    ledger = spend(PrivacyLedger(path))
    sync = os.fsync

    def lose(file):
        sync(file)
        path.unlink()

    monkeypatch.setattr(_ledger_file.os, "fsync", lose)
    with pytest.raises(FileNotFoundError, match=r"ledger\.jsonl.*PrivacyLedger\(path\)"):
        spend(ledger)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "[1]\n", "{}\n", "no end of line", "\n", "\0\0"])
def test_other_files_are_left_alone(path, text):
    path.write_text(text)
    with pytest.raises(ValueError, match=r"ledger\.jsonl is not a privacy ledger.*PrivacyLedger"):
        PrivacyLedger(path)
    assert path.read_text() == text


@pytest.mark.parametrize("version", [1, 2])
def test_another_version_of_the_format(path, version):
    PrivacyLedger(path)
    path.write_text(path.read_text().replace('"version": 3', f'"version": {version}'))
    with pytest.raises(ValueError, match=rf"ledger\.jsonl.*version {version}\b.*\b3\b"):
        PrivacyLedger(path)


def test_a_header_that_lacks_something(path):
    PrivacyLedger(path)
    path.write_text(path.read_text().replace('"budget"', '"buget"'))
    with pytest.raises(ValueError, match=r"first line.*budget, delta.*buget"):
        PrivacyLedger(path)


@pytest.mark.parametrize("line", ["{not json", "[]", "{}", '{"entry": 2}', "", "\udcff"])
def test_a_damaged_line_is_an_error(path, line):
    ledger = spend(PrivacyLedger(path), 3)
    lines = path.read_bytes().split(b"\n")
    lines[2] = line.encode(errors="surrogateescape")
    path.write_bytes(b"\n".join(lines))
    for use in (spend, PrivacyLedger.total, lambda ledger: PrivacyLedger(ledger.path)):
        with pytest.raises(ValueError, match=r"line 3\b.*ledger\.jsonl.*not a valid entry"):
            use(ledger)


def test_a_lost_line_is_an_error(path):
    ledger = spend(PrivacyLedger(path), 3)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:2] + lines[3:]))
    with pytest.raises(ValueError, match=r"line 3\b.*ledger\.jsonl.*entry 3\b.*\b2\b"):
        ledger.total()


@pytest.mark.parametrize(
    "event", [{"kind": "SomethingNew"}, {}, {"kind": "gaussian", "sigma": 1.0}, 3]
)
def test_an_unknown_event_is_an_error(path, event):
    ledger = spend(PrivacyLedger(path, budget=4.0))
    header, entry, _ = path.read_bytes().split(b"\n")
    entry = _ledger_file._encoded({**ledger.entries[0], "events": [event]})
    path.write_bytes(header + b"\n" + entry + b"\n")
    for use in (spend, PrivacyLedger.total):
        with pytest.raises(ValueError, match=r"entry 1\b.*ledger\.jsonl.*event.*version"):
            use(ledger)


def test_a_system_without_file_locks(path, monkeypatch):
    monkeypatch.setattr(_ledger_file, "fcntl", None)
    with pytest.raises(OSError, match=r"PrivacyLedger.*fcntl"):
        PrivacyLedger(path)
    assert not path.exists()
