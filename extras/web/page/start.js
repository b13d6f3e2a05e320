// The message if the page's modules never run, which is why this file is not a module.

(() => {
  const line = document.getElementById("loading");
  if (location.protocol === "file:") {
    line.textContent = "Serve this folder: run python -m http.server in it and open http://localhost:8000.";
    return;
  }
  const complain = ({ target, message }) => {
    if (document.body.dataset.state !== "loading") return;
    if (target.type === "module") line.textContent = "Part of the page did not load. Check your connection and reload.";
    else if (message) line.textContent = `This browser is too old for the page: ${message}.`;
  };
  addEventListener("error", complain, true);
})();
