"""The official toolkit's server for the games in games/, on a free port of this machine: its log tells it."""

from pathlib import Path

from arc_agi import Arcade, OperationMode

games = str(Path(__file__).with_name("games"))
Arcade(operation_mode=OperationMode.OFFLINE, environments_dir=games).listen_and_serve("127.0.0.1", port=0)
