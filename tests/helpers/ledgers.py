"""Entries of privacy ledgers, and processes that write them."""

import multiprocessing

from pfl_sklearn.privacy import GaussianEvent

DELTA = 1e-5
GAUSSIAN = GaussianEvent(0.1, 0.2)
FORK = multiprocessing.get_context("fork")


def spend(ledger, n=1, events=(GAUSSIAN,)):
    """The ledger with n more entries."""
    for _ in range(n):
        ledger.spend(events, what="Somebody")
    return ledger


def numbers(ledger):
    """Numbers of the entries."""
    return [entry["entry"] for entry in ledger.entries]


def in_child(function, *args):
    """What a function returns in a process of its own, or the text of its exception."""
    receiver, sender = FORK.Pipe(duplex=False)

    def work():
        try:
            sender.send(function(*args))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    process = FORK.Process(target=work)
    process.start()
    answer = receiver.recv() if receiver.poll(30) else "hangs"
    process.kill()
    process.join()
    return answer


def run_at_once(works):
    """Run functions in processes of their own; their exit codes."""
    processes = [FORK.Process(target=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]
