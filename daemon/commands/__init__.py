"""The command line `ckptd`: one module for each verb or group of verbs."""
