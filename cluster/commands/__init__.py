"""The commands of `kvferry`, a file for each group; `cluster.cli` puts them together.

Each file has one `add(commands)`, which adds its parsers; a command's function gets the parsed
arguments, prints, and raises what `cluster.cli.main` turns into an exit code. What loads Ray or
torch is imported in the function that needs it: commands of clients start without that second.
"""
