"""The main job: replays a serving trace, moving and verifying real blocks. See run.py for how."""
