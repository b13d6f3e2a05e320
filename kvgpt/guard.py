"""The first call of every script: open streams, and a Ctrl-C that is quiet while the imports take seconds."""

import os
import signal
import sys
from contextlib import contextmanager, suppress


class Report:
    """stderr. A write that fails loses the message, not the text or the files that the message is about."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self):
        with suppress(OSError):
            self.stream.flush()


def guard_process():
    """Open the streams that are closed, let a write to stderr fail without an error, and make Ctrl-C quiet.

    A script calls this before its imports.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file to be opened would take the number, and with it the messages of C libraries
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    # print(file=None) would write to stdout
    sys.stderr = Report(sys.stderr or open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a process in the background may ignore Ctrl-C
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))


@contextmanager
def exit_after_signals(*names):
    """Turn the signals of these names inside the block into an exit, after all inner blocks have cleaned up.

    The exit code is 128 plus the number of the signal. The handler raises KeyboardInterrupt. A library may turn it into
    an error of its own, as the ONNX exporter does. The exit code is the same then.
    """
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows has no SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    received = []

    def interrupt(signum, frame):
        received.append(signum)
        raise KeyboardInterrupt

    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup ignores a lost terminal on purpose
            signal.signal(number, interrupt)
    try:
        yield
    except BaseException:
        if not received:
            raise
        sys.exit(128 + received[0])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
