// Says what to do where the modules of the page cannot run at all. A classic script, which runs everywhere.

function refuse(message) {
  document.body.dataset.state = "failed";
  document.getElementById("status").textContent = "";
  document.getElementById("message").textContent = message;
}

if (location.protocol === "file:") {
  refuse(
    "A browser lets no page read its neighbours from a disk. Serve this folder: run python -m http.server in it, " +
      "then open http://localhost:8000.",
  );
}
document.querySelector("script[type=module]").addEventListener("error", () => {
  if (location.protocol === "file:") return;
  refuse(
    "A module of the page did not load. Write the folder again (python export.py --format web) and serve it " +
      "(python -m http.server).",
  );
});
