"""The commands, one verb each; in an installation `ppfleetx.tools`."""
