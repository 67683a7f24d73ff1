// Whether a scan may use the columnar path at all.  `columnar` is the only option that Java reads: with
// it off, none of this jar's other classes runs, so a fault in them cannot reach such a query.
package pk.reader;

import java.io.IOException;
import java.io.InputStream;
import java.net.URL;
import java.nio.charset.StandardCharsets;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import scala.collection.Iterator;

/** The switch of the columnar path, and the identity of this jar. */
public final class Switch {
  private static final Logger LOG = LoggerFactory.getLogger(Switch.class);
  private static final String OPTION = "columnar";
  private static final String VARIABLE = "PK_SPARK_COLUMNAR";
  private static volatile boolean warned;

  /** The hash of the sources that this jar was built from; a plan names the one it was made for. */
  public static final String BUILD = readBuild();

  private Switch() {}

  /** Returns whether the query asks for the columnar path and every executor can have the jar. */
  public static boolean isOn(CaseInsensitiveStringMap options) {
    String given = options.get(OPTION);
    if (given == null) {
      given = System.getenv(VARIABLE);
    }
    return given != null && given.trim().equalsIgnoreCase("true") && isShipped();
  }

  /** Logs once per JVM why the Python path is used although the columnar one was asked for. */
  public static void warnOnce(String why) {
    if (!warned) {
      warned = true;
      LOG.warn("pk reads through Python: {}", why);
    }
  }

  /** An executor without the jar could not even deserialise its task, let alone fall back. */
  private static boolean isShipped() {
    SparkContext context = SparkContext.getOrCreate(); // it exists: a query is being planned
    if (context.isLocal()) {
      return true;
    }
    URL here = Switch.class.getProtectionDomain().getCodeSource().getLocation();
    String name = here.getPath().substring(here.getPath().lastIndexOf('/') + 1);
    for (Iterator<String> jars = context.listJars().iterator(); jars.hasNext(); ) {
      if (jars.next().endsWith("/" + name)) {
        return true;
      }
    }
    warnOnce(name + " is not in spark.jars, so executors may lack it");
    return false;
  }

  private static String readBuild() {
    try (InputStream in = Switch.class.getResourceAsStream("/pk/build.txt")) {
      return in == null ? "" : new String(in.readAllBytes(), StandardCharsets.US_ASCII).trim();
    } catch (IOException cause) {
      return "";
    }
  }
}
