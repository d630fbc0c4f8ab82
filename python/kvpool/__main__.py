from kvpool.cli.main import run

run()
