"Prints what the hostile cases have shown."

from hostile import COUNTS, report


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        terminalreporter.section('hostile input')
        terminalreporter.write_line(report())
