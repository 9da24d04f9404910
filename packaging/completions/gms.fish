complete --keep-order --exclusive --command gms --arguments "(_GMS_COMPLETE=fish gms -- (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token))"
