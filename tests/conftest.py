pytest_plugins = ["shared_fixtures", "prepare_fixtures"]
