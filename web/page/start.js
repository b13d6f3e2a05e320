// What the page says if its modules never run. So this file is no module.

(() => {
  const line = document.getElementById("loading");
  if (location.protocol === "file:") {
    line.textContent = "Serve this folder: run python -m http.server in it, and open http://localhost:8000.";
    return;
  }
  const complain = ({ target, message }) => {
    if (document.body.dataset.state !== "loading") return;
    if (target.type === "module") line.textContent = "The page did not arrive as a whole. Check the connection and reload.";
    else if (message) line.textContent = `This browser is too old for the page: ${message}.`;
  };
  addEventListener("error", complain, true);
})();
