pytest_plugins = ["shared_fixtures"]
