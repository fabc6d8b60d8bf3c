"""The report of a run: ``report.html`` and ``report.json``, made from the files of its output directory."""
