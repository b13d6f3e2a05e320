// Opened from file:// a browser refuses modules. This classic script says what to do then.
if (location.protocol === "file:") {
  document.body.dataset.state = "failed";
  document.getElementById("status").textContent = "";
  document.getElementById("message").textContent =
    "A browser lets no page read its neighbours from a disk. Serve this folder: run python -m http.server in it, " +
    "then open http://localhost:8000.";
}
