"""One measuring engine: `rows.Row` is a measured setting, `meter.Meter` draws and times it, commands are views of it.

Next to it the programs behind the figures of the pages, each run as `python -m lantern_lab.measure.NAME`.
"""
